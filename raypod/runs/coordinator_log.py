"""`logs/coordinator.log`: the output of a detached coordinator, and the times of its lines."""

from __future__ import annotations

from pathlib import Path

from raypod.events import Event
from raypod.runs.callback import Callback
from raypod.system.log_times import LogTimes

NAME = "coordinator.log"


def log_of(run_dir: Path) -> Path:
    """Return the log file of a detached run's coordinator."""
    return run_dir / "logs" / NAME


class CoordinatorLogTimes(Callback):
    """Marks the times of the coordinator's log while events arrive; without such a log it does nothing."""

    def __init__(self, run_dir: Path) -> None:
        self._times = LogTimes(log_of(run_dir))

    def on_event(self, event: Event) -> None:
        """Write a mark, unless the last one is recent."""
        self._times.mark()
