"""`--checkpoint-copies`: a thread keeps the newest checkpoint of a run also on other hosts.

The run never waits for it, except at its end for a limited time. Nothing that fails here ends or slows the run: a host
to which a transfer fails is replaced by the next one, with one warning.
"""

from __future__ import annotations

import socket
import threading
import time
import traceback
from collections import Counter, deque
from pathlib import Path
from typing import Any, Callable, Deque, Dict, List, Optional

from raypod.errors import CheckpointDamaged, RaypodError, summarize_exception
from raypod.events import CheckpointSaved, Event, RunEnded, RunStarted
from raypod.plan.plan import Plan
from raypod.runs.callback import Callback
from raypod.runtime.coordinator import copy_sender
from raypod.runtime.coordinator.copy_sender import Source
from raypod.runtime.coordinator.copy_targets import Abandoned, CopyTargets, SharedDisk
from raypod.runtime.workers.fleet import Fleet
from raypod.training.checkpoint import storage
from raypod.training.checkpoint.copies import FOLDER, Age

_ATTEMPTS = 2  # per host and checkpoint
_POLL_S, _QUIET_S = 0.05, 2.0
_FLAG = "--checkpoint-copies"


class CheckpointCopies(Callback):
    """The copies of one run: a context that ends the thread, to be left before the fleet is closed.

    `run_id` is the name of the run on other hosts, once it has begun.
    """

    def __init__(
        self,
        plan: Plan,
        fleet: Fleet,
        warn: Callable[[str], None],
        print_line: Callable[[str], None],
        seconds_left: Callable[[], Optional[float]] = lambda: None,
        folder: str = FOLDER,
    ) -> None:
        """Nothing is copied if the plan has `checkpoint_copies` 1.

        Args:
            plan: the plan of the run.
            fleet: its hosts.
            warn: receives warnings, in the thread that calls `on_event`.
            print_line: receives a line about the wait at the end, likewise.
            seconds_left: returns the time until this process must end; None for no limit.
            folder: that of the copies of all runs, on every host.
        """
        run = plan.config.run
        self._run_dir, self._fleet, self._folder = Path(plan.run_dir), fleet, folder
        self._copies, self._timeout_s = run.checkpoint_copies, run.save_timeout_s
        self._start_timeout_s, self._stop_timeout_s = run.start_timeout_s, run.stop_timeout_s
        self._warn, self._print_line, self._seconds_left = warn, print_line, seconds_left
        self._files: Optional[Path] = None  # the folder of the files of the run, if it is not the run folder
        self.run_id = ""
        self._changed = threading.Condition()
        self._queued: Optional[Path] = None
        self._is_busy = self._has_ended = self._is_short = False
        self._messages: Deque[str] = deque()
        self._targets: Optional[CopyTargets] = None
        self._thread: Optional[threading.Thread] = None
        self._newest: Optional[Path] = None  # checkpoint that was begun to be copied, and its age
        self._age: Optional[Age] = None
        self._held: List[str] = []  # the other hosts that have a copy of it
        self._failed = 0  # transfers

    def on_event(self, event: Event) -> None:
        """Begin with the run, copy each checkpoint that is saved, and wait at the end. Called in one thread."""
        if self._copies == 1:
            return
        if isinstance(event, RunStarted):
            self._begin()
        elif isinstance(event, CheckpointSaved):
            self._queue(Path(event.path))
        elif isinstance(event, RunEnded):
            self._finish(is_complete=not event.interrupted)
        while self._messages:
            self._warn(self._messages.popleft())

    def send_from(self, folder: Path, checkpoint: Path) -> List[str]:
        """Copy a checkpoint of another folder, which has the files of the run, and wait until that is done.

        Returns the hosts that have it.
        """
        if self._targets is None:
            return []
        self._files = folder
        self._queue(checkpoint)
        self._finish(is_complete=False)
        while self._messages:
            self._warn(self._messages.popleft())
        return self._held if self._newest == checkpoint else []

    def summary(self) -> Dict[str, Any]:
        """Return the entry of `summary.json`; {} without copies."""
        if self._copies == 1:
            return {}
        hosts = [socket.gethostname(), *self._held]
        name = self._newest.name if self._newest else None
        counts = {"wanted": self._copies, "held": len(hosts), "failed": self._failed}
        return {"checkpoint_copies": {"run_id": self.run_id, "checkpoint": name, **counts, "hosts": hosts}}

    def __exit__(self, *_: object) -> None:
        """End the thread. A transfer in progress leaves a partial copy, which the next one on that host removes."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        if self._targets is not None:
            self._targets.close()
        if self._thread is not None:
            self._thread.join(self._stop_timeout_s)

    def _begin(self) -> None:
        """Start the thread, with the checkpoint from which the run resumes."""
        others = len(self._fleet.peers())
        if others + 1 < self._copies:
            alive = f"only {others} other host{' is' if others == 1 else 's are'} alive"
            self._warn(f"{_FLAG} {self._copies}: {alive}, so there are fewer copies until more hosts join")
        try:
            self.run_id = copy_sender.run_id(self._run_dir)
        except OSError as error:
            self._warn(f"{_FLAG}: no copies are kept: {error.strerror or error}")
            return
        self._targets = CopyTargets(self._fleet, self._folder, self.run_id, self._copies, self._start_timeout_s)
        thread = threading.Thread(target=self._run, args=(self._targets,), name="checkpoint copies", daemon=True)
        thread.start()  # a lost lease can interrupt it: a thread that has not started cannot be joined
        self._thread = thread
        latest = storage.latest_name(self._run_dir)
        if latest is not None:
            self._queue(storage.checkpoints_folder(self._run_dir) / latest)

    def _queue(self, path: Path) -> None:
        with self._changed:
            self._queued = path
            self._changed.notify_all()

    def _finish(self, is_complete: bool) -> None:
        """Wait until the newest checkpoint is copied, at most the time for a checkpoint."""
        if self._targets is None:
            return
        left_s, began_s, is_announced = self._seconds_left(), time.monotonic(), False
        limit_s = self._timeout_s if left_s is None else min(left_s, self._timeout_s)
        while self._is_working():
            if time.monotonic() - began_s > limit_s:
                self._messages.append(
                    f"the last checkpoint is not copied to other hosts within {max(0, limit_s):.0f} s"
                )
                return
            if time.monotonic() - began_s > _QUIET_S and not is_announced:
                self._print_line(
                    f"waiting until the last checkpoint is copied to other hosts ({limit_s:.0f} s at most)"
                )
                is_announced = True
            time.sleep(_POLL_S)  # short, so that signals are handled
        self._targets.finish(self._age if is_complete else None, self._held)

    def _is_working(self) -> bool:
        with self._changed:
            return self._is_busy or self._queued is not None

    def _run(self, targets: CopyTargets) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.wait_for(lambda: self._has_ended or self._queued is not None)
                if self._has_ended:
                    return
                path, self._queued, self._is_busy = self._queued, None, True
            assert path is not None, "the wait is for it"
            try:
                self._copy(targets, path)
            except Exception as error:  # noqa: BLE001 - the thread's top level: the run continues without this copy
                if self._has_ended or isinstance(error, Abandoned):
                    return
                self._failed += 1
                is_expected = isinstance(error, (OSError, RaypodError))
                if not is_expected:
                    traceback.print_exc()
                cause = str(error) if is_expected else summarize_exception(error)
                self._messages.append(f"{path.name} is not copied to other hosts: {cause}")

    def _copy(self, targets: CopyTargets, path: Path) -> None:
        """Copy a checkpoint to as many hosts as are wanted."""
        try:
            with copy_sender.opened(self._run_dir, path, self._files) as source:
                self._newest, self._age, self._held = path, source.age, []
                attempts: Counter[str] = Counter()
                while True:
                    given_up = [host for host, count in attempts.items() if count >= _ATTEMPTS]
                    host = targets.choose(self._held, [each for each in given_up if each not in self._held])
                    if host is None:
                        break
                    attempts[host] += 1
                    self._try(targets, host, source)
        except (CheckpointDamaged, FileNotFoundError):
            if storage.is_checkpoint(path):
                raise
            return  # it was removed: a newer one follows
        was_short, self._is_short = self._is_short, len(self._held) + 1 < self._copies
        if self._is_short and not was_short:
            there = f"{len(self._held) + 1} of {self._copies} hosts"
            self._messages.append(f"{path.name} is on {there} ({_FLAG}): no other host can keep a copy at the moment")

    def _try(self, targets: CopyTargets, host: str, source: Source) -> None:
        """Copy a checkpoint to a host, or count its failure."""
        name = source.checkpoint.path.name
        try:
            if targets.open(host) != source.age:
                server, is_abandoned = targets.server(host), lambda: self._has_ended
                copy_sender.send(server, source, self.run_id, self._timeout_s, is_abandoned)
            self._held = [*self._held, host]
        except SharedDisk as shared:
            self._messages.append(f"host {host} keeps no copies of checkpoints: {shared}")
        except OSError as error:
            if self._has_ended:
                raise Abandoned from error
            if storage.is_checkpoint(source.checkpoint.path):
                storage.verify(source.checkpoint)  # what is damaged on this host is no fault of the other one
            self._failed += 1
            if targets.note_failure(host) == 1:
                cause = error.strerror or str(error)
                self._messages.append(f"{name} is not copied to host {host}, the next host takes its place: {cause}")
