"""Start a process for each tracker of a run, and end it with the run, within a limited time.

What a tracker's process remembers in the run folder: `trackers/<name>.json`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Callable, Optional

from raypod.errors import LeaseLost
from raypod.events import Event, RunEnded, RunStarted
from raypod.observe.trackers.tracker import FAILED, FINISHED, INTERRUPTED, Steps
from raypod.plan.layout import LOGS, TRACKERS
from raypod.plan.plan import Plan
from raypod.runs import run_state
from raypod.runs.callback import Callback
from raypod.runs.run_state import end_of
from raypod.system.companion import Companion


class TrackerProcesses(Callback):
    """The processes of the trackers of a run; a context that ends them. It records nothing by itself."""

    def __init__(
        self,
        plan: Plan,
        warn: Callable[[str], None],
        print_line: Callable[[str], None],
        started_unix_s: float,
        seconds_left: Callable[[], Optional[float]] = lambda: None,
    ) -> None:
        """`started_unix_s` is the time of day from which the times in metrics.jsonl count.

        `seconds_left` returns the time until this process must end; None for no limit.
        """
        run, self._end = plan.config.run, INTERRUPTED
        flags = [f"--artifacts={run.tracker_artifacts}", f"--started-unix-s={started_unix_s}"]
        self._processes = [
            Companion(
                Path(plan.run_dir),
                "tracker",
                f"tracker {name}",
                "raypod.observe.trackers.process",
                [name, *flags],
                run.tracker_timeout_s,
                "--tracker-timeout-s",
                f"{TRACKERS}/{file_name(name)}.json",
                f"{LOGS}/tracker-{file_name(name)}.log",
                TrackerRecord(),
                warn,
                print_line,
                seconds_left,
            )
            for name in run.trackers or ()
            if name != "tensorboard"  # which the sinks write
        ]

    def on_event(self, event: Event) -> None:
        """Start the processes when the run has started; look for failures."""
        for each in self._processes:
            if isinstance(event, RunStarted):
                each.start()
            each.look()
        if isinstance(event, RunEnded):
            self._end = INTERRUPTED if event.interrupted else FINISHED

    def __exit__(self, kind: Optional[type], error: Optional[BaseException], trace: object) -> None:
        """Let the processes record the rest, and end those that need too long."""
        if error is not None:
            self._end = FAILED if end_of(error)[0] == run_state.FAILED else INTERRUPTED
        try:
            if not isinstance(error, LeaseLost):  # another process has the folder, and its own trackers
                self._finish()
        finally:
            for each in self._processes:
                each.kill()

    def _finish(self) -> None:
        started = [each for each in self._processes if each.process is not None]
        for each in started:
            each.begin_end(self._end)
        for each in started:
            if not each.is_complete():
                reason = f": {each.state.error}" if each.state.error else ""
                each.warn(f"has not recorded the whole run within {each.limit_s:.3g} s ({each.limit}){reason}")


@dataclasses.dataclass(frozen=True)
class TrackerRecord:
    """The run of the tracker, and what it has recorded. It holds no address and no secret."""

    run_id: Optional[str] = None
    training: int = -1  # the newest update whose metrics are recorded
    test: int = -1  # the newest update whose evaluation is recorded
    error: str = ""  # why the tracker fails at the moment
    is_complete: bool = False  # everything is recorded, and the run of the tracker has ended
    media: int = -1  # the newest update whose pictures and texts are recorded

    @property
    def steps(self) -> Steps:
        """The newest recorded steps."""
        return Steps(self.training, self.test, self.media)

    def at_start(self) -> TrackerRecord:
        return dataclasses.replace(self, error="", is_complete=False)


def path_of(run_dir: Path, tracker: str) -> Path:
    """Return the file of a tracker."""
    return run_dir / TRACKERS / f"{file_name(tracker)}.json"


def file_name(tracker: str) -> str:
    """Return the name of a tracker as a part of a file name."""
    return tracker.replace(":", ".")
