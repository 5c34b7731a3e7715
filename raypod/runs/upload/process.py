"""The process that mirrors a run: `python -m raypod.runs.upload.process RUN URL`, started by `mirror.py`, or by hand.

In rounds, repeated after errors with growing pauses, it compares the run folder with the storage and uploads what is
missing, so it can be killed and started at any time.
Lines of standard input name checkpoints that were saved; its end is the end of the run, or of the coordinator. From
then on the process has a limited time.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import threading
import time
import traceback
import uuid
from pathlib import Path
from typing import Any, Callable, Dict, List

from raypod.errors import ConfigError
from raypod.plan import layout
from raypod.plan.layout import STORAGE, SUMMARY
from raypod.plan.metric import Metric
from raypod.runs.upload import mirror_record
from raypod.runs.upload.mirror_record import MirrorRecord, add_to_summary
from raypod.runs.upload.mirrored_files import LATEST, MirroredCheckpoints, MirroredFiles
from raypod.runs.upload.remote_index import PlaceTaken, RemoteIndex
from raypod.system import files
from raypod.system.command_line import show
from raypod.system.companion import NOT_AGAIN, Input, SavedState, attending
from raypod.system.remote.backends import check_scheme
from raypod.system.remote.errors import describe, secrets
from raypod.system.remote.store import Store
from raypod.system.retries import growing, retried
from raypod.system.urls import check_url
from raypod.training.checkpoint.format import Retention

NICE = 19  # the run goes first
STALLED = 75  # exit code of a process whose storage library hangs; the coordinator starts it again
_STALL_S = 900.0  # without progress; the longest time between two signs of it is that of a part at 0.1 Mbit/s
_WATCH_S = 5.0
_MANUAL_S = 3600.0  # if a person starts this process
_LOCK = "storage.lock"
_INTERVAL_S = 10.0  # between rounds
_FIRST_WAIT_S, _MOST_WAIT_S = 1.0, 30.0  # between attempts
_SHARE = 0.05  # of the time for files that grow, which are uploaded as a whole
_LEAST_GAP_S = 1.0  # between rounds, if checkpoints follow each other faster
_PATIENCE = 2  # failures in a row, before they are reported


class RunMirror:
    """Keeps the copy of a run folder on a storage up to date. `is_taken`: another process has the place."""

    def __init__(self, run_dir: Path, store: Store, kept: Retention, writer: str) -> None:
        self._run_dir, self._store = run_dir, store
        self._file = SavedState(run_dir / STORAGE, MirrorRecord())
        is_known = self._memory.place == store.url
        is_own_log = functools.partial(mirror_record.is_run_of, run_dir)
        self._index = RemoteIndex(store, self._memory.run_id, writer, is_known, is_own_log)
        self._files = MirroredFiles(run_dir, store, self._index)
        self._checkpoints = MirroredCheckpoints(run_dir, store, kept, self._index.check)
        self._before = self._memory  # the counts of an earlier process of this run
        self._failed_in_a_row = 0
        self._is_new = True  # the connection
        self.is_taken = False

    @property
    def _memory(self) -> MirrorRecord:
        return self._file.state

    def follow(self, commands: Input) -> bool:
        """Mirror the run until it ends. Return whether everything is on the storage: nothing here is damaged.

        The commands name checkpoints that were saved. Errors of the storage are repeated without end: the coordinator
        ends this process.
        """
        self._remember(is_complete=False)  # the process of an earlier start may have ended after the run began
        try:
            while True:
                has_ended, began_s = commands.has_ended, time.monotonic()
                self._retried(lambda: self._round(commands), commands)
                if has_ended:
                    self._finish(commands)
                    return self._memory.is_complete
                self._pause(commands, time.monotonic() - began_s)
        except PlaceTaken as error:
            self.is_taken = True
            self._remember(error=describe(error), last_error=describe(error), pending=self._pending())
            return False

    def _retried(self, action: Callable[[], None], commands: Input) -> None:
        retried(action, growing(_FIRST_WAIT_S, _MOST_WAIT_S), self._note_failure, sleep=commands.wait)

    def _pause(self, commands: Input, took_s: float) -> None:
        """Wait for the next round."""
        least_s = max(_LEAST_GAP_S, took_s)
        ends_s = time.monotonic() + max(_INTERVAL_S, took_s / _SHARE)
        began_s = time.monotonic()
        commands.wait(ends_s - began_s)
        gap_s = least_s - (time.monotonic() - began_s)
        while gap_s > 0 and not commands.has_ended:
            time.sleep(min(gap_s, 0.1))
            gap_s -= 0.1

    def _round(self, commands: Input) -> None:
        files.check_held(self._run_dir)  # another folder there has nothing of this run
        self._store.is_busy = True
        saved = commands.take()
        for name in saved:
            self._checkpoints.announce(name)
        self._remember(pending=self._pending())
        if self._memory.place != self._store.url:
            self._index.check()
            self._remember(place=self._store.url, run_id=self._index.run_id)
        is_thorough = bool(saved) or self._is_new or commands.has_ended
        if is_thorough:
            self._files.audit()
        self._files.damaged = {}  # they are read again
        # The metrics before the checkpoint: a run that resumes from it finds every line before it.
        self._files.sync(self._files.pending())
        self._remember(pending=self._pending())
        if is_thorough or self._checkpoints.pending():
            self._checkpoints.sync()
            self._files.sync([LATEST])
        self._is_new, self._failed_in_a_row = False, 0
        self._remember(**self._left())
        self._store.is_busy = False

    def _finish(self, commands: Input) -> None:
        """Upload `summary.json` with the counts of the mirror, and the index."""
        is_summarized = (self._run_dir / SUMMARY).is_file()
        if is_summarized:
            self._remember(pending=self._damaged)
            add_to_summary(self._run_dir, self._memory, self._store.url)
        self._remember(pending=[*self._damaged, *([SUMMARY] if is_summarized else [])])

        def upload() -> None:
            self._store.is_busy = True
            self._files.sync([SUMMARY] if is_summarized else [])
            self._index.write()

        self._retried(upload, commands)
        self._remember(**self._left(), is_complete=not self._damaged)

    @property
    def _damaged(self) -> Dict[str, Exception]:
        """The errors of what cannot be read on this host, by name."""
        return {**self._checkpoints.damaged, **self._files.damaged}

    def _pending(self) -> List[str]:
        return [*self._files.pending(), *self._checkpoints.pending(), *self._checkpoints.damaged]

    def _left(self) -> Dict[str, Any]:
        """Return what is to be remembered after uploads: nothing is missing except what is damaged on this host."""
        damaged = self._damaged
        error = describe(next(iter(damaged.values()))) if damaged else ""
        return {"pending": damaged, "error": error, **({"last_error": error} if damaged else {})}

    def _note_failure(self, error: Exception) -> bool:
        """Record a failure; return whether what failed is repeated."""
        if isinstance(error, PlaceTaken):
            return False
        traceback.print_exception(type(error), error, error.__traceback__)
        self._failed_in_a_row += 1
        self._is_new = True
        self._store.disconnect()
        self._store.is_busy = False
        text = describe(error)
        is_reported = self._failed_in_a_row >= _PATIENCE or not self._memory.place
        shown = text if is_reported else self._memory.error
        failures = self._memory.failures + 1
        self._remember(error=shown, last_error=text, failures=failures, pending=self._pending())
        return True

    def _remember(self, **changed: Any) -> None:
        before = self._before
        self._file.remember(
            checkpoints=before.checkpoints + self._checkpoints.uploads,
            files=before.files + self._files.uploads,
            uploaded_bytes=before.uploaded_bytes + self._store.written_bytes,
            skipped_checkpoints=before.skipped_checkpoints + len(self._checkpoints.skipped),
            **{**changed, "pending": tuple(changed.get("pending", self._memory.pending))},
        )


def watch(store: Store) -> None:
    """End this process if the storage library hangs."""
    while time.monotonic() - store.progress_s < _STALL_S or not store.is_busy:
        time.sleep(_WATCH_S)
    show(f"no progress for {_STALL_S:g} s: the process ends", sys.stderr)
    time.sleep(1.0)  # for the thread that redacts the output
    os._exit(STALLED)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="raypod.runs.upload.process", description="Mirror a run folder to a storage.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("url", help="of the folder of all runs, as --storage-path")
    parser.add_argument("--keep", type=int, default=3, help="newest checkpoints to keep on the storage [3]")
    parser.add_argument("--metric", default="loss", help="the best checkpoint by this metric is kept, too [loss]")
    parser.add_argument("--better", choices=["lower", "higher"], default="lower")
    parser.add_argument("--timeout-s", type=float, default=_MANUAL_S)
    parser.add_argument("--writer", default=uuid.uuid4().hex, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not (args.run_dir / layout.CONFIG).is_file():
        parser.error(f"{args.run_dir} has no {layout.CONFIG}; is it a run folder?")
    try:
        args.url = check_url(args.url, "URL")
        check_scheme(args.url, "URL")
    except ConfigError as error:
        parser.error(str(error))
    return args


def main() -> int:
    """Mirror a run until it ends; return 0 once everything is on the storage."""
    os.nice(NICE)
    args = _arguments()
    run_dir = args.run_dir.resolve()
    store = Store(f"{args.url}/{run_dir.name}")
    kept = Retention(args.keep, Metric(args.metric, args.better))
    with attending(run_dir, run_dir / _LOCK, args.timeout_s, "run.storage_timeout_s", secrets()) as entered:
        threading.Thread(target=watch, args=(store,), name="watch", daemon=True).start()
        try:
            mirror = RunMirror(run_dir, store, kept, args.writer)
            return 0 if mirror.follow(entered) else NOT_AGAIN if mirror.is_taken else 1
        except Exception:  # noqa: BLE001 - its text goes through the redaction
            traceback.print_exc()
            return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of a storage library must not delay the end
