"""Events of `events.jsonl` as lines for people."""

from __future__ import annotations

import math
import time
from typing import Any, Callable, Dict, FrozenSet, List, Mapping, Optional

from raypod.cli import counted
from raypod.errors import ConfigError
from raypod.events import (
    CheckpointBegun,
    CheckpointFailed,
    CheckpointSaved,
    EpochDone,
    EvaluationDone,
    InstanceLost,
    InstanceWarned,
    PhaseBegun,
    Repaired,
    Resized,
    RunEnded,
    RunStarted,
    StoppedEarly,
)
from raypod.record.event_log import event_name

_PROCESS = ("process_started", "process_failed", "process_interrupted", "process_preempted")
SHOWN = frozenset(
    [
        *_PROCESS,
        *map(event_name, (RunStarted, EvaluationDone, CheckpointSaved, CheckpointFailed, InstanceLost, Repaired)),
        *map(event_name, (InstanceWarned, Resized, StoppedEarly, RunEnded)),
    ]
)
ALL = SHOWN | {"call_times", *map(event_name, (PhaseBegun, CheckpointBegun, EpochDone))}

Record = Mapping[str, Any]


def parse_kinds(text: str) -> FrozenSet[str]:
    """Return the kinds of events that `--events` names. ConfigError for an unknown one."""
    named = {"none": frozenset(), "main": SHOWN, "all": ALL}
    found = named.get(text)
    if found is not None:
        return found
    kinds = [each.strip() for each in text.split(",")]
    unknown = [each for each in kinds if each not in ALL]
    if unknown:
        raise ConfigError(
            f"--events {text}: {unknown[0]!r} is no kind of event; known: none, main, all, {', '.join(sorted(ALL))}"
        )
    return frozenset(kinds)


def text_of(record: Record) -> str:
    """Return an event as one line with its local time. A field that is missing or has another type is left out."""
    kind, unix_s = str(record.get("event", "")), time_of(record)
    clock = "unknown time" if unix_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
    describe = _TEXTS.get(kind, _fields)
    try:
        detail = describe(record)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):  # written by another version
        detail = _fields(record)
    return " ".join(f"{clock} {kind.replace('_', ' ')}{': ' if detail else ''}{detail}".split())


def time_of(record: Record) -> Optional[float]:
    """Return the time of an event in seconds since 1970; None if it is missing or no time."""
    unix_s = record.get("unix_s")
    if not isinstance(unix_s, (int, float)):
        return None
    try:
        time.localtime(unix_s)
    except (ValueError, OverflowError, OSError):  # NaN, or a year that no calendar has
        return None
    return float(unix_s)


def _process_started(record: Record) -> str:
    version = f"raypod {record['raypod']}, " if "raypod" in record else ""
    counts = ", ".join(f"{name} {record[name]}" for name in ("hosts", "instances", "replicas") if name in record)
    return f"{version}pid {record['pid']} on {record['host']}; updates {record['total_updates']}, {counts}"


def _process_ended(record: Record) -> str:
    return f"exit code {record['exit_code']}{': ' if record['message'] else ''}{record['message']}"


def _run_started(record: Record) -> str:
    hosts = ", ".join(dict.fromkeys(each["host"] for each in record["instances"]))
    seconds = math.fsum(record["seconds"].values())
    instances = counted(len(record["instances"]), "instance")
    return (
        f"{instances} on {hosts} after {seconds:.1f} s; generation {record['generation']}, "
        f"from update {record['first_update']}; {record['device_line']}"
    )


def _phase_begun(record: Record) -> str:
    return f"{record['phase']} after update {record['update']}"


def _metrics(record: Record) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in record["metrics"].items())


def _evaluation_done(record: Record) -> str:
    return f"{_metrics(record)} after update {record['update']} on {record['samples']} samples"


def _epoch_done(record: Record) -> str:
    return f"epoch {record['epoch']}: {_metrics(record)}"


def _checkpoint_saved(record: Record) -> str:
    return f"{record['path']} after update {record['update']}, weights {record['weights_sha256'][:12]}"


def _checkpoint_failed(record: Record) -> str:
    rest = f"{record['previous']} still exists" if record["previous"] else "there is no earlier one"
    waits = "; the training waits for the disk" if record.get("waits_s") else ""
    return f"{record['path']} after update {record['update']}: {record['cause']}; {rest}{waits}"


def _instance_lost(record: Record) -> str:
    heartbeat = f" (last heartbeat: {record['activity']})" if record["activity"] else ""
    return f"instance {record['instance']} on {record['host']} {record['kind']}{heartbeat}: {record['cause']}"


def _instance_warned(record: Record) -> str:
    return f"instance {record['instance']}: {record['text']}"


def _repaired(record: Record) -> str:
    moved = ", ".join(f"instance {each} on {host}" for each, host in zip(record["lost"], record["hosts"]))
    return (
        f"{moved}, from {record['seeded_from']}; continues after update {record['update']}, {record['seconds']:.1f} s; "
        f"restarts {record['restarts']}, generation {record['generation']}"
    )


def _resized(record: Record) -> str:
    return (
        f"{counted(record['replicas'], 'replica')} x accumulation {record['gradient_accumulation']} after update "
        f"{record['update']}, instead of {counted(record['replicas_before'], 'replica')}: {record['cause']}"
    )


def _stopped_early(record: Record) -> str:
    return f"after update {record['update']}: {record['metric']} was best after update {record['best_update']}"


def _run_ended(record: Record) -> str:
    how = "interrupted" if record["interrupted"] else "complete"
    how = "preempted" if record.get("preempted") else how
    cause = f" ({record['cause']})" if record["cause"] else ""
    return f"{how}{cause} after update {record['updates']}, weights {record['weights_sha256'][:12]}"


def _call_times(record: Record) -> str:
    parts: List[str] = []
    for each in record["instances"]:
        ratio = each["busy_ratio"]
        parts.append(
            f"instance {each['instance']} {each['p50_s'] * 1e3:.1f} ms"
            + (f" (busy {ratio:.2f} of the median)" if isinstance(ratio, (int, float)) else "")
        )
    return f"{counted(record['calls'], 'call')} from update {record['first_update']}; {', '.join(parts)}"


def _fields(record: Record) -> str:
    plain = {name: value for name, value in record.items() if name not in ("unix_s", "event")}
    return ", ".join(f"{name} {_number(value)}" for name, value in plain.items() if not isinstance(value, (dict, list)))


def _number(value: Any) -> str:
    if value is None:
        return "nan"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


_TEXTS: Dict[str, Callable[[Record], str]] = {
    "process_started": _process_started,
    "process_failed": _process_ended,
    "process_interrupted": _process_ended,
    "process_preempted": _process_ended,
    "run_started": _run_started,
    "phase_begun": _phase_begun,
    "evaluation_done": _evaluation_done,
    "epoch_done": _epoch_done,
    "checkpoint_saved": _checkpoint_saved,
    "checkpoint_failed": _checkpoint_failed,
    "instance_lost": _instance_lost,
    "instance_warned": _instance_warned,
    "repaired": _repaired,
    "resized": _resized,
    "stopped_early": _stopped_early,
    "run_ended": _run_ended,
    "call_times": _call_times,
}
