"""Start a process for each tracker of a run, and end it with the run, within a limited time."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import time
from pathlib import Path
from typing import Callable, Dict, List, Optional

from raypod.errors import LeaseLost
from raypod.events import Event, PhaseBegun, RunEnded, RunStarted
from raypod.observe.trackers import tracker_record
from raypod.observe.trackers.tracker import FAILED, FINISHED, INTERRUPTED
from raypod.plan.layout import LOGS
from raypod.plan.plan import Plan
from raypod.runs import run_state
from raypod.runs.run_state import end_of
from raypod.system.session_process import end_session, start_module

_POLL_S = 0.05


class TrackerProcesses:
    """The processes of the trackers of a run; a context that ends them. It records nothing by itself."""

    def __init__(self, plan: Plan, warn: Callable[[str], None], started_unix_s: float) -> None:
        """`started_unix_s` is the time of day from which the times in metrics.jsonl count."""
        run = plan.config.run
        self._folder, self._warn, self._started_unix_s = Path(plan.run_dir), warn, started_unix_s
        self._artifacts, self._timeout_s = run.tracker_artifacts, run.tracker_timeout_s
        self._names = [name for name in run.trackers or () if name != "tensorboard"]  # which the sinks write
        self._processes: Dict[str, subprocess.Popen[bytes]] = {}
        self._warned: List[str] = []
        self._end = INTERRUPTED

    def handle(self, event: Event) -> None:
        """Start the processes when the run has started; look for failures when a phase begins."""
        if isinstance(event, RunStarted):
            for name in self._names:
                self._start(name)
        elif isinstance(event, PhaseBegun):
            for name, process in self._processes.items():
                error = tracker_record.read(tracker_record.path_of(self._folder, name)).error
                if error or process.poll() is not None:
                    self._warn_once(name, f"fails: {error or 'its process has ended'}; the run continues without it")
        elif isinstance(event, RunEnded):
            self._end = INTERRUPTED if event.interrupted else FINISHED

    def __enter__(self) -> TrackerProcesses:
        return self

    def __exit__(self, kind: Optional[type], error: Optional[BaseException], _: object) -> None:
        """Let the processes record the rest, and end those that need too long."""
        if error is not None:
            self._end = FAILED if end_of(error)[0] == run_state.FAILED else INTERRUPTED
        try:
            if not isinstance(error, LeaseLost):  # another process has the folder, and its own trackers
                self._finish()
        finally:
            for process in self._processes.values():
                end_session(process)

    def _start(self, name: str) -> None:
        path = tracker_record.path_of(self._folder, name)
        log = self._folder / LOGS / f"tracker-{tracker_record.file_name(name)}.log"
        arguments = [str(self._folder.resolve()), name, f"--artifacts={self._artifacts}"]
        arguments += [f"--timeout-s={self._timeout_s}", f"--started-unix-s={self._started_unix_s}"]
        try:
            tracker_record.write(path, dataclasses.replace(tracker_record.read(path), error="", is_complete=False))
            self._processes[name] = start_module("raypod.observe.trackers.process", arguments, log)
        except OSError as error:
            self._warn_once(name, f"cannot be started: {error.strerror or error}")

    def _finish(self) -> None:
        for process in self._processes.values():
            assert process.stdin is not None
            if process.stdin.closed:
                continue
            with contextlib.suppress(OSError):  # it has ended, which the next lines notice
                process.stdin.write(self._end.encode())
                process.stdin.close()
        deadline_s = time.monotonic() + self._timeout_s
        for name, process in self._processes.items():
            while process.poll() is None and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
            found = tracker_record.read(tracker_record.path_of(self._folder, name))
            # That of an earlier start may have completed its part meanwhile.
            if process.poll() not in (None, 0) or not found.is_complete:
                reason = f": {found.error}" if found.error else ""
                missing = f"has not recorded the whole run within {self._timeout_s:g} s (--tracker-timeout-s){reason}"
                self._warn_once(name, missing)

    def _warn_once(self, name: str, text: str) -> None:
        if name not in self._warned:
            self._warned.append(name)
            self._warn(
                f"tracker {name} {text}; see {LOGS}/tracker-{tracker_record.file_name(name)}.log in the run folder"
            )
