"""The colours of states and events, and short texts about a run that several views show."""

from __future__ import annotations

from typing import Optional

from raypod.observe.monitor.model import Run
from raypod.observe.monitor.words import age, amount, percent
from raypod.runs.call_times import STRAGGLER_RATIO

GOOD, WARN, BAD, NOTE, DIM, TITLE = "green", "yellow", "bold red", "cyan", "dim", "bold"
_STATES = {
    "training": GOOD,
    "running": GOOD,
    "evaluating": "magenta",
    "saving": NOTE,
    "starting": WARN,
    "repairing": WARN,
    "ending": WARN,
    "interrupted": WARN,
    "preempted": WARN,
    "lost": BAD,
    "failed": BAD,
    "died": BAD,
    "no answer": BAD,
    "busy": WARN,
    "idle": DIM,
}
_EVENTS = {
    "instance_lost": BAD,
    "process_failed": BAD,
    "checkpoint_failed": BAD,
    "instance_warned": WARN,
    "repaired": WARN,
    "resized": WARN,
    "checkpoint_saved": NOTE,
    "evaluation_done": "magenta",
    "epoch_done": DIM,
    "run_ended": GOOD,
}
_HEARTBEAT_LATE_S, _HEARTBEAT_SILENT_S = 10.0, 30.0


def of_state(state: str) -> str:
    """Return the style of the state of a run or an instance."""
    return _STATES.get(state, "")


def of_event(kind: str) -> str:
    """Return the style of an event."""
    return _EVENTS.get(kind, "")


def of_heartbeat(age_s: Optional[float]) -> str:
    """Return the style of the age of a heartbeat."""
    if age_s is None or age_s < _HEARTBEAT_LATE_S:
        return ""
    return WARN if age_s < _HEARTBEAT_SILENT_S else BAD


def of_load(share: Optional[float]) -> str:
    """Return the style of a share of a capacity."""
    return "" if share is None or share < 0.8 else WARN if share < 0.95 else BAD


def of_ratio(ratio: Optional[float]) -> str:
    """Return the style of the busy time of an instance over the median."""
    return BAD if is_straggler(ratio) else ""


def is_straggler(ratio: Optional[float]) -> bool:
    """Return whether an instance is marked as slow."""
    return ratio is not None and ratio >= STRAGGLER_RATIO


def state_of(run: Run) -> str:
    """Return the state of a run in a word: its phase while it runs."""
    if run.problem:
        return "no answer"
    return (run.phase or run.state) if run.is_active else run.state


def share_done(run: Run) -> Optional[float]:
    """Return the share of the updates that are done; None for a launch."""
    return run.update / run.total_updates if run.total_updates else None


def rate(run: Run) -> str:
    """Return the throughput with its unit, in parts of samples if it has any; of a run that has ended, its mean."""
    rates = {name.replace("_per_s", "/s"): rate for name, rate in run.part_rates.items()}
    if not rates and run.samples_per_s is not None:
        rates = {f"{run.samples_are}/s": run.samples_per_s}
    mean = "" if run.is_active else "mean "
    return ", ".join(f"{mean}{amount(rate)} {unit}" for unit, rate in rates.items())


def last_save(run: Run, now_unix_s: float) -> str:
    """Return the update and the age of the last checkpoint."""
    if run.checkpoint_update is None:
        return "no checkpoint"
    ago = f", {age(now_unix_s - run.checkpoint_unix_s)} ago" if run.checkpoint_unix_s and run.is_active else ""
    return f"saved after {run.checkpoint_update}{ago.replace('now ago', 'now')}"


def last_evaluation(run: Run) -> str:
    """Return the metrics of the last evaluation."""
    if run.evaluation_update is None:
        return ""
    metrics = " ".join(f"{name} {amount(value)}" for name, value in run.evaluation.items())
    return f"evaluated after {run.evaluation_update}: {metrics}"


def waiting(run: Run) -> str:
    """Return the share of waiting for data."""
    return "" if run.data_wait_share is None else f"{percent(run.data_wait_share)} waiting for data"
