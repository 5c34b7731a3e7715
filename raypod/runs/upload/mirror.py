"""Start the process that mirrors a run, tell it about checkpoints, and end it with the run, within a limited time."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from pathlib import Path
from typing import Callable, Optional

from raypod.errors import LeaseLost
from raypod.events import TRAINS, CheckpointSaved, Event
from raypod.plan.layout import LOGS, STORAGE, SUMMARY
from raypod.plan.plan import Plan
from raypod.runs.callback import UploadTarget
from raypod.runs.upload.mirror_record import MirrorRecord, add_to_summary
from raypod.system.companion import Companion, read_state, write_state

_ANSWER_S = 30.0  # for the first time
_NAMED = 3  # names in the warning about what is not mirrored


class Mirror(UploadTarget):
    """The mirror of a run; a context that ends it. Without `--storage-path` it does nothing."""

    def __init__(
        self,
        plan: Plan,
        warn: Callable[[str], None],
        print_line: Callable[[str], None],
        seconds_left: Callable[[], Optional[float]] = lambda: None,
    ) -> None:
        """`seconds_left` returns the time until this process must end; None for no limit."""
        run, metric = plan.config.run, plan.best_metric
        self._path, self._is_started = run.storage_path, False
        self.url = f"{self._path}/{Path(plan.run_dir).resolve().name}"  # of the run on the storage
        arguments = [str(self._path), f"--keep={run.keep_remote or run.keep_checkpoints}", f"--metric={metric.name}"]
        arguments += [f"--better={metric.better}", f"--writer={uuid.uuid4().hex}"]
        self._process = Companion(
            Path(plan.run_dir),
            "mirror",
            f"storage {self.url}",
            "raypod.runs.upload.process",
            arguments,
            run.storage_timeout_s,
            "--storage-timeout-s",
            STORAGE,
            f"{LOGS}/storage.log",
            MirrorRecord(),
            warn,
            print_line,
            seconds_left,
        )

    def on_event(self, event: Event) -> None:
        """Start the process when the run trains, tell it about checkpoints, and look for failures."""
        if self._path is None:
            return
        mirror = self._process
        if isinstance(event, TRAINS) and not self._is_started:
            self._is_started = True
            mirror.start()
        elif isinstance(event, CheckpointSaved):
            mirror.send(Path(event.path).name)  # if that fails, the process finds the checkpoint by itself
        mirror.look()
        has_answered = mirror.state.error or mirror.state.place
        if mirror.process is not None and not has_answered and time.monotonic() - mirror.started_s > _ANSWER_S:
            mirror.warn(f"has not answered for {_ANSWER_S:g} s; the run continues, and the mirror tries again")

    def __exit__(self, kind: Optional[type], error: Optional[BaseException], trace: object) -> None:
        """Let the process upload the rest, and end it if it needs too long."""
        try:
            if self._process.process is not None and not isinstance(error, LeaseLost):  # another one has the folder
                self._finish()
        finally:
            self._process.kill()

    def send_from(self, folder: Path, checkpoint: Path) -> str:
        """See `UploadTarget.send_from`. The folder has the name of the run folder, and is mirrored to the same URL."""
        if self._path is None:
            return ""
        self._process.kill()
        self._process.folder = folder
        self._process.start()
        return f": continue on another disk with --resume {self.url} --run-dir FOLDER" if self._finish() else ""

    def _finish(self) -> bool:
        """End the process once it has uploaded the rest, within the time; return whether the storage has everything."""
        mirror = self._process
        try:
            mirror.begin_end()
            is_complete = mirror.is_complete()
        except KeyboardInterrupt:
            self._record_missing("the wait for it was interrupted")
            raise
        if not is_complete:
            self._record_missing(mirror.limit)
        mirror.kill()
        return is_complete

    def _record_missing(self, cause: str) -> None:
        """End the process, and record and show what the storage does not hold."""
        mirror = self._process
        mirror.kill()
        mirror.state = read_state(mirror.folder / STORAGE, mirror.state)
        # A process that has not reached the storage has not noted what is missing.
        pending = mirror.state.pending or ("everything since the last upload",)
        found = dataclasses.replace(mirror.state, pending=pending, is_complete=False)
        with contextlib.suppress(OSError, ValueError):  # there is none, or the disk is full: the warning remains
            write_state(mirror.folder / STORAGE, found)
            if (mirror.folder / SUMMARY).is_file():
                add_to_summary(mirror.folder, found, self.url)
        names = ", ".join(pending[:_NAMED]) + (", ..." if len(pending) > _NAMED else "")
        reason = f": {found.last_error}" if found.last_error else ""
        missing = f"does not hold {names} at the end of the run ({cause}){reason}"
        if mirror.has_warned:
            mirror.print_line(f"{mirror.name} {missing}")
        else:
            mirror.warn(missing)
