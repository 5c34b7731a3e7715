"""An update or an evaluation as a line of `metrics.jsonl` or `evaluations.jsonl`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, Type, TypeVar, Union

from raypod.events import EvaluationDone, UpdateDone
from raypod.plan.values import NORMS

_Measured = TypeVar("_Measured", UpdateDone, EvaluationDone)


def flat_record(event: Union[UpdateDone, EvaluationDone]) -> Dict[str, Any]:
    """Return the fields of an event with its metrics, rates and norms among them, as a line of a file holds them.

    None is left out, and so are details, which have a file of their own.
    """
    record: Dict[str, Any] = {}
    for name, value in vars(event).items():
        if value is not None and name != "details":
            record.update(value if name in ("metrics", "part_rates", "norms") else {name: value})
    return record


def from_flat_record(event_type: Type[_Measured], record: Dict[str, Any]) -> _Measured:
    """Return the event of a `flat_record`, also of an earlier version. TypeError if a field is missing."""
    names = {field.name for field in dataclasses.fields(event_type)}
    fields = {name: value for name, value in record.items() if name in names}
    others = {name: value for name, value in record.items() if name not in names}
    if "norms" in names:
        fields["norms"] = {name: others.pop(name) for name in NORMS if name in others}
    return event_type(metrics=others, **fields)


def traces_of(update: UpdateDone) -> Dict[str, float]:
    """Return what is known of the optimizer in an update, by the names of `plan.values.TRACES`."""
    of_optimizer = {"learning_rate": update.learning_rate, "loss_scaling": update.loss_scaling}
    known = {name: value for name, value in of_optimizer.items() if value is not None}
    return {**known, **{name: value for name, value in update.norms.items() if not math.isnan(value)}}
