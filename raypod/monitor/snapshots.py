"""A run as the monitor shows it, from the JSON of its status endpoint, and events in one line."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from raypod.cli import counted
from raypod.monitor.model import EventLine, Instance, Run, Usage
from raypod.monitor.words import amount, clean, duration

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
    found: List[EventLine] = []
    for record in records:
        kind, unix_s = str(record.get("event")), record.get("unix_s")
        describe = _TEXTS.get(kind)
        if describe is not None:
            try:
                text = describe(record)
            except (KeyError, TypeError, ValueError, AttributeError):  # of another version
                text = kind.replace("_", " ")
            found.append(EventLine(unix_s if isinstance(unix_s, (int, float)) else None, kind, clean(text)))
    return tuple(found)


def _metrics(record: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {amount(value)}" for name, value in record["metrics"].items())


def _lost(record: Mapping[str, Any]) -> str:
    heartbeat = f"; last heartbeat: {record['activity']}" if record.get("activity") else ""
    return f"instance {record['instance']} on {record['host']} lost ({record['kind']}{heartbeat}): {record['cause']}"


def _repaired(record: Mapping[str, Any]) -> str:
    moved = ", ".join(f"instance {each} on {host}" for each, host in zip(record["lost"], record["hosts"]))
    seconds = record.get("seconds")
    took = f" in {duration(seconds)}" if isinstance(seconds, (int, float)) else ""
    return f"replaced{took}: {moved}; weights from {record['seeded_from']}; continues after update {record['update']}"


def _ended(record: Mapping[str, Any]) -> str:
    cause = f" ({record['cause']})" if record.get("cause") else ""
    how = "interrupted" if record["interrupted"] else "done"
    how = "preempted" if record.get("preempted") else how
    return f"{how}{cause} after update {record['updates']}"


_TEXTS: Dict[str, Callable[[Mapping[str, Any]], str]] = {
    "process_started": lambda record: f"process {record['pid']} started on {record['host']}",
    "run_started": lambda record: f"started: generation {record['generation']}, from update {record['first_update']}",
    "epoch_done": lambda record: f"epoch {record['epoch']}: {_metrics(record)}",
    "evaluation_done": lambda record: f"evaluated after update {record['update']}: {_metrics(record)}",
    "checkpoint_saved": lambda record: f"saved after update {record['update']}: {record['path'].rpartition('/')[2]}",
    "checkpoint_failed": lambda record: f"checkpoint after update {record['update']} failed: {record['cause']}",
    "instance_lost": _lost,
    "instance_warned": lambda record: f"warning of instance {record['instance']}: {record['text']}",
    "repaired": _repaired,
    "resized": lambda record: f"continues on {counted(record['replicas'], 'replica')} after update {record['update']}",
    "stopped_early": lambda record: f"stops early after update {record['update']}: {record['metric']}",
    "run_ended": _ended,
    "process_failed": lambda record: f"failed with exit code {record['exit_code']}: {record['message']}",
    "process_interrupted": lambda record: "interrupted by a signal",
    "process_preempted": lambda record: record["message"],
    "program_started": lambda record: f"program {record['instance']} started on {record['host']}",
    "program_ended": lambda record: f"program {record['instance']} ended with exit code {record['exit_code']}",
}
