"""Start the process that mirrors a run, tell it about checkpoints, and end it with the run, within a limited time.

It is a process, not a thread: the storage libraries take the interpreter's lock, can hang, and keep memory. Nothing
that it does or fails to do stops or slows the coordinator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import time
import uuid
from pathlib import Path
from typing import Callable, List, Optional

from raypod.errors import LeaseLost
from raypod.events import CheckpointSaved, Event, RunStarted
from raypod.plan.layout import LOGS, SUMMARY
from raypod.plan.plan import Plan
from raypod.runs.upload import mirror_record
from raypod.runs.upload.run_mirror import TAKEN, add_to_summary
from raypod.system.files import make_folder
from raypod.system.session_process import end_session, start_module

_POLL_S, _LOOK_S = 0.05, 1.0
_ANSWER_S = 30.0  # for the first time
_RESTART_S = (1.0, 5.0, 30.0, 60.0)  # between starts of a process that has died; the last one repeats
_NAMED = 3  # names in the warning about what is not mirrored


class Mirror:
    """The mirror of a run; a context that ends it. Without `--storage-path` it does nothing."""

    def __init__(self, plan: Plan, warn: Callable[[str], None], print_line: Callable[[str], None]) -> None:
        run, self._metric = plan.config.run, plan.best_metric
        self._folder, self._warn, self._print_line = Path(plan.run_dir), warn, print_line
        self._path, self._timeout_s = run.storage_path, run.storage_timeout_s
        self._keep = run.keep_remote or run.keep_checkpoints
        self._writer = uuid.uuid4().hex
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._known = mirror_record.MirrorRecord()  # what it has remembered last
        self._has_warned = False
        self._looked_s, self._started_s, self._starts = 0.0, 0.0, 0

    @property
    def url(self) -> str:
        """The URL of the run on the storage."""
        return f"{self._path}/{self._folder.resolve().name}"

    def handle(self, event: Event) -> None:
        """Start the process when the run has started, tell it about checkpoints, and look for failures."""
        if self._path is None:
            return
        if isinstance(event, RunStarted):
            self._begin()
        elif isinstance(event, CheckpointSaved):
            self._send(Path(event.path).name)
        self._look()

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, kind: Optional[type], error: Optional[BaseException], _: object) -> None:
        """Let the process upload the rest, and end it if it needs too long."""
        try:
            if self._process is not None and not isinstance(error, LeaseLost):  # another process has the folder
                self._finish()
        finally:
            self._kill()

    def send_from(self, folder: Path) -> str:
        """Mirror another folder of the same run and name to the same place, and wait until that is done.

        Returns the URL; "" if it does not hold the newest checkpoint, or there is no mirror.
        """
        if self._path is None:
            return ""
        self._kill()
        with contextlib.suppress(OSError):
            make_folder(folder / LOGS)
            mirror_record.write(folder, self._known)
        self._folder = folder
        self._begin()
        return self.url if self._finish() else ""

    def _begin(self) -> None:
        try:
            found = mirror_record.read(self._folder)
            kept = (found.run_id, found.place, found.resumed, found.resumed_generation)
            mirror_record.write(self._folder, mirror_record.MirrorRecord(*kept))
        except OSError as error:
            self._warn_once(f"cannot be used: {error.strerror or error}")
            return
        self._start()

    def _start(self) -> None:
        arguments: List[str] = [str(self._folder.resolve()), str(self._path), f"--keep={self._keep}"]
        arguments += [f"--timeout-s={self._timeout_s}", f"--metric={self._metric.name}"]
        arguments += [f"--better={self._metric.better}", f"--writer={self._writer}"]
        self._started_s, self._starts = time.monotonic(), self._starts + 1
        try:
            self._process = start_module("raypod.runs.upload.process", arguments, self._folder / LOGS / "storage.log")
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
        except OSError as error:
            self._warn_once(f"cannot be used: its process cannot be started: {error.strerror or error}")

    def _send(self, name: str) -> None:
        """Write a line to the process. If the pipe is full or closed, the process finds the checkpoint by itself."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                os.write(self._process.stdin.fileno(), f"{name}\n".encode())

    def _look(self) -> None:
        """Warn about a failure, and start a process again that has died, from time to time."""
        found = self._warn_of_error()
        if self._process is None or found is None:
            return
        if not found.error and not found.place and time.monotonic() - self._started_s > _ANSWER_S:
            self._warn_once(f"has not answered for {_ANSWER_S:g} s; the run continues, and the mirror tries again")
        if self._has_died():
            wait_s = _RESTART_S[min(self._starts, len(_RESTART_S)) - 1]
            if time.monotonic() - self._started_s > wait_s:
                self._kill()
                self._start()

    def _warn_of_error(self) -> Optional[mirror_record.MirrorRecord]:
        """Return what the process remembers, at most once per second; warn if it fails."""
        now_s = time.monotonic()
        if self._process is None or now_s - self._looked_s < _LOOK_S:
            return None
        self._looked_s = now_s
        found = mirror_record.read(self._folder)
        self._known = found if found.run_id else self._known  # not that of a folder that is lost
        if found.error:
            self._warn_once(f"fails: {found.error}; the run continues, and the mirror tries again")
        return found

    def _has_died(self) -> bool:
        """Return whether the process has ended, unless another one has the place; an outage is no reason to end."""
        return self._process is not None and self._process.poll() not in (None, TAKEN)

    def _finish(self) -> bool:
        """End the process once it has uploaded the rest, within the time; return whether the storage has everything."""
        if self._has_died():
            self._kill()
            self._start()
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        deadline_s = time.monotonic() + self._timeout_s
        while self._process is not None and self._process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            self._warn_of_error()
        # Not what it remembers: the process of an earlier start may have ended meanwhile.
        is_complete = self._process is not None and self._process.poll() == 0
        self._kill()
        if is_complete:
            return True
        found = mirror_record.read(self._folder)
        # A process that has not reached the storage has not noted what is missing.
        pending = found.pending or ("everything since the last upload",)
        found = dataclasses.replace(found, pending=pending, is_complete=False)
        with contextlib.suppress(OSError, ValueError):  # there is none, or the disk is full: the warning remains
            mirror_record.write(self._folder, found)
            if (self._folder / SUMMARY).is_file():
                add_to_summary(self._folder, found, self.url)
        self._report(found)
        return False

    def _report(self, found: mirror_record.MirrorRecord) -> None:
        names = ", ".join(found.pending[:_NAMED]) + (", ..." if len(found.pending) > _NAMED else "")
        reason = f": {found.last_error}" if found.last_error else ""
        missing = f"does not hold {names} at the end of the run (--storage-timeout-s {self._timeout_s:g}){reason}"
        if self._has_warned:
            self._print_line(f"storage {self.url} {missing}")
        else:
            self._warn_once(missing)

    def _warn_once(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(f"storage {self.url} {text}; see {LOGS}/storage.log in the run folder")

    def _kill(self) -> None:
        """End the process and those that it has started, which have its session."""
        process, self._process = self._process, None
        if process is not None:
            end_session(process)
