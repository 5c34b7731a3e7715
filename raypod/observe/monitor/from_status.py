"""A run as the monitor shows it, from the JSON of its status endpoint, and events in one line."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from raypod.observe.monitor.model import EventLine, Instance, Run, Usage
from raypod.observe.monitor.words import clean
from raypod.runs.event_text import RECENT, text_of, time_of

Snapshot = Mapping[str, Any]
_COPIED = (  # keys that have the same name and meaning in `Run`
    *("host", "pid", "user", "phase", "started_unix_s", "device_line", "update", "total_updates", "epoch", "epochs"),
    *("eta_s", "last_update_unix_s", "samples_are", "samples_per_s", "data_wait_share", "restarts", "generation"),
    "repaired_unix_s",
)
_COPIED_INSTANCE = (
    *("instance", "host", "pid", "state", "activity", "activity_s", "waits_for_others", "samples_per_s"),
    *("heartbeat_age_s", "log_file"),
)
_COPIED_CALL = ("data_wait_share", "p50_s", "p95_s", "slowest_s", "busy_ratio")


def run_of(snapshot: Snapshot, **more: Any) -> Run:
    """Return the run of a snapshot; `more` are fields of `Run`, which win.

    Raises:
        TypeError, ValueError, KeyError, AttributeError: the snapshot is something else.
    """
    if snapshot.get("kind") == "launch":
        return _launch(snapshot, more)
    checkpoints, evaluation = snapshot.get("checkpoints") or {}, snapshot.get("last_evaluation") or {}
    last = checkpoints.get("last") or {}
    fields: Dict[str, Any] = {key: snapshot[key] for key in _COPIED if snapshot.get(key) is not None}
    fields.update(
        run_dir=str(snapshot["run_dir"]),
        program=str(snapshot.get("task") or ""),
        state="starting" if snapshot.get("phase") == "starting" else "running",
        part_rates=_numbers(snapshot.get("part_rates") or {}),
        metrics=_numbers(snapshot.get("metrics") or {}),
        checkpoint_update=last.get("update"),
        checkpoint_unix_s=last.get("unix_s"),
        checkpoints_failed=checkpoints.get("failed") or 0,
        evaluation=_numbers(evaluation.get("metrics") or {}),
        evaluation_update=evaluation.get("update"),
        instances=tuple(_instance(each) for each in snapshot.get("instances") or ()),
        hosts=_hosts(snapshot),
        series=_series(snapshot.get("recent_updates") or {}),
        events=event_lines(snapshot.get("events") or ()),
    )
    return Run(**{**fields, **more})


def _launch(snapshot: Snapshot, more: Mapping[str, Any]) -> Run:
    """Return the programs of `raypod launch` as instances."""
    command = snapshot.get("command") or ""
    fields: Dict[str, Any] = {
        "run_dir": str(snapshot["run_dir"] or ""),
        "kind": "launch",
        "program": clean(command if isinstance(command, str) else " ".join(map(str, command))),
        "state": "running",
        "instances": tuple(_program(each) for each in snapshot.get("instances") or ()),
        "hosts": _hosts(snapshot),
        "events": event_lines(snapshot.get("events") or ()),
    }
    copied = ("host", "pid", "user", "phase", "started_unix_s")
    fields.update({key: snapshot[key] for key in copied if snapshot.get(key) is not None})
    return Run(**{**fields, **more})


def _hosts(snapshot: Snapshot) -> Dict[str, Usage]:
    known = dict.fromkeys(Usage.__dataclass_fields__)
    return {
        str(name): Usage(**{key: value for key, value in (usage or {}).items() if key in known})
        for name, usage in (snapshot.get("hosts") or {}).items()
    }


def _instance(content: Mapping[str, Any]) -> Instance:
    calls, replicas, ipus = (
        content.get("call_s") or {},
        content.get("replicas") or (0, 0),
        content.get("ipus") or (0, 0),
    )
    fields = {key: content[key] for key in _COPIED_INSTANCE if content.get(key) is not None}
    fields.update({key: calls.get(key) for key in _COPIED_CALL})
    fields.update(zip(("first_replica", "num_replicas", "first_ipu", "num_ipus"), (*replicas, *ipus)))
    line = content.get("log_line") or content.get("last_line")  # of a training, of a launch
    return Instance(**fields, log_line=clean(str(line)) if line else None)


def _program(content: Mapping[str, Any]) -> Instance:
    instance = _instance(content)
    code = content.get("exit_code")
    return instance if code is None else dataclasses.replace(instance, state=f"exit code {code}")


def _numbers(values: Mapping[str, Any]) -> Dict[str, Optional[float]]:
    return {str(name): None if value is None else float(value) for name, value in values.items()}


def _series(columns: Mapping[str, Sequence[Any]]) -> Dict[str, Tuple[Optional[float], ...]]:
    return {
        str(name): tuple(None if value is None or not math.isfinite(value) else float(value) for value in values)
        for name, values in columns.items()
        if name != "update"
    }


def event_lines(records: Sequence[Mapping[str, Any]]) -> Tuple[EventLine, ...]:
    """Return the events that the monitor shows, of records as `events.jsonl` has them."""
    shown = [each for each in records if each.get("event") in RECENT]
    return tuple(EventLine(time_of(each), str(each["event"]), clean(text_of(each))) for each in shown)
