"""An update or an evaluation as a line of `metrics.jsonl` or `evaluations.jsonl`."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Type, TypeVar, Union

from raypod.events import EvaluationDone, UpdateDone

_Measured = TypeVar("_Measured", UpdateDone, EvaluationDone)


def flat_record(event: Union[UpdateDone, EvaluationDone]) -> Dict[str, Any]:
    """Return the fields of an event with its metrics and rates among them, as a line of a file holds them."""
    record: Dict[str, Any] = {}
    for name, value in vars(event).items():
        record.update(value if name in ("metrics", "part_rates") else {name: value})
    return record


def from_flat_record(event_type: Type[_Measured], record: Dict[str, Any]) -> _Measured:
    """Return the event of a `flat_record`. TypeError if a field is missing."""
    names = {field.name for field in dataclasses.fields(event_type)}
    fields = {name: value for name, value in record.items() if name in names}
    metrics = {name: value for name, value in record.items() if name not in names}
    return event_type(metrics=metrics, **fields)
