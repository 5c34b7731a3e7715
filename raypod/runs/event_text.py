"""The text of each event of `events.jsonl`, for the logs, the monitor, the report and the status: one table.

`progress.py` has the lines of the console."""

from __future__ import annotations

import math
import time
from typing import Any, Callable, Dict, List, Mapping, Optional

from raypod.errors import as_utf8
from raypod.system.command_line import counted

Record = Mapping[str, Any]


def text_of(record: Record) -> str:
    """Return an event as one line: its name and what `detail_of` says."""
    name, detail = str(record.get("event", "")).replace("_", " "), detail_of(record)
    return f"{name}: {detail}" if detail else name


def detail_of(record: Record) -> str:
    """Return what an event says, in one line of UTF-8. Of one that another version has written, its plain fields."""
    describe = TEXTS.get(str(record.get("event")), _fields)
    try:
        detail = describe(record)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        detail = _fields(record)
    return as_utf8(" ".join(detail.split()))


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
    where = line = ""
    if "instances" in record:  # the status endpoint leaves out what is long
        hosts = ", ".join(dict.fromkeys(each["host"] for each in record["instances"]))
        seconds = math.fsum(record["seconds"].values())
        where = f"{counted(len(record['instances']), 'instance')} on {hosts} after {seconds:.1f} s; "
        line = f"; {record['device_line']}"
    return f"{where}generation {record['generation']}, from update {record['first_update']}{line}"


def _metrics(record: Record) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in record["metrics"].items())


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
    return f"instance {record['instance']}: {record['text']}" if record["log_file"] else record["text"]


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


TEXTS: Dict[str, Callable[[Record], str]] = {
    "process_started": _process_started,
    "process_failed": _process_ended,
    "process_interrupted": _process_ended,
    "process_preempted": _process_ended,
    "run_started": _run_started,
    "phase_begun": lambda record: f"{record['phase']} after update {record['update']}",
    "checkpoint_begun": lambda record: f"after update {record['update']}",
    "evaluation_done": lambda record: (
        f"{_metrics(record)} after update {record['update']} on {record['samples']} samples"
    ),
    "epoch_done": lambda record: f"epoch {record['epoch']}: {_metrics(record)}",
    "checkpoint_saved": _checkpoint_saved,
    "checkpoint_failed": _checkpoint_failed,
    "instance_lost": _instance_lost,
    "instance_warned": _instance_warned,
    "repaired": _repaired,
    "resized": _resized,
    "stopped_early": _stopped_early,
    "run_ended": _run_ended,
    "call_times": _call_times,
    # Of the programs of `raypod launch`, in its status endpoint.
    "program_started": lambda record: f"program {record['instance']} on {record['host']}",
    "program_ended": lambda record: f"program {record['instance']} with exit code {record['exit_code']}",
}
ALL = frozenset(TEXTS) - {"program_started", "program_ended"}  # what `events.jsonl` can hold
_DETAILS = ("call_times", "phase_begun", "checkpoint_begun")
RECENT = frozenset(TEXTS) - {*_DETAILS}  # what the monitor and the status endpoint show
MAIN = ALL & RECENT - {"epoch_done"}  # what logs and the report show by default
