"""The lines of `metrics.jsonl` and `evaluations.jsonl`: an update or an evaluation, written and read in one place."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Type, TypeVar, Union

from raypod.events import EvaluationDone, UpdateDone
from raypod.plan.values import NORMS
from raypod.runs.growing_file import last_lines
from raypod.system.files import keep_beginning, parse_json

Measured = TypeVar("Measured", UpdateDone, EvaluationDone)
_GROUPS = ("metrics", "part_rates", "norms")  # fields that hold values by name
_FIELDS = {kind: {field.name for field in dataclasses.fields(kind)} for kind in (UpdateDone, EvaluationDone)}


def flat(event: Union[UpdateDone, EvaluationDone]) -> Dict[str, Any]:
    """Return the fields of an event with its metrics, rates and norms among them, for `summary.json` and tables.

    None is left out, and so are details, which have a file of their own.
    """
    record: Dict[str, Any] = {}
    for name, value in vars(event).items():
        if value is not None and name != "details":
            record.update(value if name in _GROUPS else {name: list(value) if isinstance(value, tuple) else value})
    return record


def line_of(event: Union[UpdateDone, EvaluationDone]) -> Dict[str, Any]:
    """Return an event as a line of its file.

    The metrics of an update are also at the top level: programs of users read them there. The next version drops those.
    """
    return {**flat(event), "metrics": event.metrics} if isinstance(event, UpdateDone) else flat(event)


def events_in(event_type: Type[Measured], records: Iterable[Mapping[str, Any]]) -> List[Measured]:
    """Return the events of lines. Evaluations, and updates of earlier versions, have metrics at the top level only.

    Lines of something else are skipped. null reads as NaN.
    """
    found = []
    for record in records:
        with contextlib.suppress(TypeError):  # it lacks a field, or has one of another kind
            found.append(_event_of(event_type, record))
    return found


def _event_of(event_type: Type[Measured], record: Mapping[str, Any]) -> Measured:
    values = {name: value for name, value in record.items() if name not in _FIELDS[event_type]}
    fields = {name: record[name] for name in _FIELDS[event_type] - {*_GROUPS, "details"} if name in record}
    metrics = record.get("metrics", {})
    if event_type is UpdateDone:
        fields["missing_reports"] = tuple(fields.get("missing_reports", ()))
        fields["norms"] = {name: values.pop(name) for name in NORMS if name in values}
        rates = [name for name in values if name.endswith("_per_s") and name not in metrics]
        fields["part_rates"] = {name: values.pop(name) for name in rates}
    if "metrics" not in record:
        metrics = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    if not isinstance(metrics, dict) or type(fields.get("update")) is not int:
        raise TypeError("no line of this kind")
    known = {name: math.nan if value is None else value for name, value in metrics.items()}
    return event_type(metrics=known, **fields)


def traces_of(update: UpdateDone) -> Dict[str, float]:
    """Return what is known of the optimizer in an update, by the names of `plan.values.TRACES`."""
    of_optimizer = {"learning_rate": update.learning_rate, "loss_scaling": update.loss_scaling}
    known = {name: value for name, value in of_optimizer.items() if value is not None}
    return {**known, **{name: value for name, value in update.norms.items() if not math.isnan(value)}}


def keep_until(path: Path, update: int) -> None:
    """Remove the lines after `update`."""
    # The lines are in the order of their updates, and only the last one can be truncated.
    kept = (line.end for line in last_lines(path) if update_of(line.text) <= update)
    keep_beginning(path, next(kept, 0))


def update_of(line: bytes) -> float:
    """Return the update of a line; infinity for a truncated line."""
    try:
        content: Any = parse_json(line)
        return int(content["update"])
    except (ValueError, KeyError, TypeError):
        return math.inf
