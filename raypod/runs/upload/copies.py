"""`--checkpoint-copies`: a thread chooses other hosts and sends them the newest checkpoint of a run.

The run never waits for it, except at its end for a limited time. Nothing that fails here ends or slows the run: a host
to which a transfer fails is replaced by the next one, with one warning.

All files are opened before the first one is sent: a checkpoint that is removed meanwhile is sent to its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import socket
import threading
import time
import traceback
import uuid
from collections import Counter, deque
from pathlib import Path
from typing import Any, Callable, Collection, Deque, Dict, Iterator, List, Mapping, Optional, Sequence, Set

from typing_extensions import Protocol

from raypod.errors import RaypodError, summarize_exception
from raypod.events import CheckpointSaved, Event, RunEnded, RunStarted
from raypod.plan import layout
from raypod.plan.plan import Plan
from raypod.runs import event_log, run_state
from raypod.runs.callback import UploadTarget
from raypod.runs.growing_file import line_begin
from raypod.runs.upload.copy_folder import FOLDER, Age, CopyReceiver, Opened
from raypod.system.command_line import INTERRUPTED, shortened
from raypod.system.files import FilePart, parse_json, replace_file, strict_json
from raypod.system.retries import awaited
from raypod.training.checkpoint import storage, transfer
from raypod.training.checkpoint.format import Checkpoint, Retention
from raypod.training.checkpoint.transfer import CheckpointSender, Requests, Server

_ATTEMPTS = 2  # per host and checkpoint
_FLAG = "--checkpoint-copies"


class Hosts(Protocol):
    """The hosts of the pod, as a fleet knows them: see `Fleet.peers` and `Fleet.serve_on`."""

    def peers(self) -> List[str]: ...

    def serve_on(self, host: str, kind: Callable[..., Any], *arguments: Any) -> Server: ...


class CheckpointCopies(UploadTarget):
    """The copies of one run: a context that ends the thread, to be left before the fleet is closed.

    `run_id` is the name of the run on other hosts, once it has begun.
    """

    def __init__(
        self,
        plan: Plan,
        fleet: Hosts,
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
        self._show_messages()

    def copy_to(self, folder: Path) -> None:
        if self.run_id:
            _write_run_id(folder, self.run_id)

    def send_from(self, folder: Path, checkpoint: Path) -> str:
        if self._targets is None:
            return ""
        self._files = folder
        self._queue(checkpoint)
        self._finish(is_complete=False)
        self._show_messages()
        if self._newest != checkpoint or not self._held:
            return ""
        return (
            f" on host {shortened(self._held)}: once the disk is back, `raypod up --no-restart FILE` brings it to "
            f"{self._run_dir}; then continue with --resume {self._run_dir}"
        )

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
            self.run_id = run_id(self._run_dir)
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
        left_s = self._seconds_left()
        limit_s = self._timeout_s if left_s is None else min(left_s, self._timeout_s)
        wait = f"waiting until the last checkpoint is copied to other hosts ({limit_s:.0f} s at most)"
        if awaited(self._is_idle, limit_s, lambda: self._print_line(wait)):
            self._targets.finish(self._age if is_complete else None, self._held)
        else:
            self._messages.append(f"the last checkpoint is not copied to other hosts within {max(0, limit_s):.0f} s")

    def _is_idle(self) -> bool:
        with self._changed:
            return not self._is_busy and self._queued is None

    def _show_messages(self) -> None:
        while self._messages:
            self._warn(self._messages.popleft())

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
        with storage.unless_removed(path), open_source(self._run_dir, path, self._files) as source:
            self._newest, self._age, self._held = path, source.age, []
            attempts: Counter[str] = Counter()
            while True:
                given_up = [host for host, count in attempts.items() if count >= _ATTEMPTS]
                host = targets.choose(self._held, [each for each in given_up if each not in self._held])
                if host is None:
                    break
                attempts[host] += 1
                self._try(targets, host, source)
            was_short, self._is_short = self._is_short, len(self._held) + 1 < self._copies
            if self._is_short and not was_short:
                there = f"{len(self._held) + 1} of {self._copies} hosts"
                missing = "no other host can keep a copy at the moment"
                self._messages.append(f"{path.name} is on {there} ({_FLAG}): {missing}")

    def _try(self, targets: CopyTargets, host: str, source: Source) -> None:
        """Copy a checkpoint to a host, or count its failure."""
        name = source.checkpoint.path.name
        try:
            if targets.open(host) != source.age:
                server, is_abandoned = targets.server(host), lambda: self._has_ended
                send_source(server, source, self.run_id, self._timeout_s, is_abandoned)
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


_CLOSE_S = 5.0  # for a host to record the end of the run


class Abandoned(Exception):
    """The run ends, and with it a transfer."""


class SharedDisk(Exception):
    """A host keeps its copies on the disk of another one."""


class CopyTargets:
    """The hosts to which one run copies its checkpoints. Used by one thread, except `close`."""

    def __init__(self, fleet: Hosts, folder: str, run_id: str, copies: int, timeout_s: float) -> None:
        """`folder` is that of the copies of all runs; `timeout_s` is the time for a process to start on a host."""
        self._fleet, self._folder, self._run_id = fleet, folder, run_id
        self._copies, self._timeout_s = copies, timeout_s
        self._servers: Dict[str, Server] = {}
        self._own_mark = uuid.uuid4().hex
        self._marks: Dict[str, str] = {}  # by host
        self._failures: Counter[str] = Counter()  # by host
        self._shared: Set[str] = set()
        self._has_ended = False
        self._here = CopyReceiver(folder, run_id)
        with contextlib.suppress(OSError):  # this host cannot keep copies: then it shares no folder with one that can
            self._here.open(self._own_mark, ())

    def choose(self, held: Collection[str], given_up: Collection[str]) -> Optional[str]:
        """Return the next host to copy to, or None if enough hosts hold it or none is left.

        Args:
            held: the hosts that have the checkpoint.
            given_up: further hosts that are not used for it.
        """
        unused = {*given_up, *self._shared}
        usable = [host for host in self._fleet.peers() if host not in unused]
        chosen: List[str] = copy_hosts(usable, self._copies, self._failures)
        return next((host for host in chosen if host not in held), None)

    def open(self, host: str) -> Optional[Age]:
        """Start the process on a host, unless it runs; return the newest copy that it has, if it was started.

        Raises:
            SharedDisk: the host writes to a disk that has a copy already. It is not used any more.
            OSError: the host does not respond, or cannot write.
            Abandoned: `close` was called.
        """
        if host in self._servers:
            return None
        server = self._servers[host] = self._fleet.serve_on(host, CopyReceiver, self._folder, self._run_id)
        if self._has_ended:
            self.drop(host)
            raise Abandoned
        mark = uuid.uuid4().hex
        requests = Requests(server, self._timeout_s)
        requests.add("open", mark, [self._own_mark, *self._marks.values()])
        opened: Opened = requests.finish()[0]
        if opened.shares_with is not None:
            other = {mark: name for name, mark in self._marks.items()}.get(opened.shares_with, "the coordinator's host")
            self._shared.add(host)
            self.drop(host)
            raise SharedDisk(f"its folder {self._folder} is that of {other}")
        self._marks[host] = mark
        return opened.held

    def server(self, host: str) -> Server:
        """Return the process on a host that was opened. ConnectionError if it was dropped meanwhile."""
        found = self._servers.get(host)
        if found is None:
            raise ConnectionError("the run ends")
        return found

    def note_failure(self, host: str) -> int:
        """Count the failure of a host, and end its process; return how often it has failed."""
        self.drop(host)
        self._failures[host] += 1
        return self._failures[host]

    def drop(self, host: str) -> None:
        """End the process on a host."""
        self._marks.pop(host, None)
        server = self._servers.pop(host, None)
        if server is not None:
            server.close()

    def finish(self, complete: Optional[Age], held: Collection[str]) -> None:
        """Remove the marks from all disks, and record on the hosts `held` that the run is complete.

        A host that does not respond is passed over: its copy remains one of a run that can be continued.
        """
        for host, server in self._servers.items():
            with contextlib.suppress(OSError):
                requests = Requests(server, _CLOSE_S)
                if complete is not None and host in held:
                    requests.add("end", complete)
                requests.add("close")
                requests.finish()

    def close(self) -> None:
        """End all processes. Called in any thread: requests in progress raise OSError."""
        self._has_ended = True
        for host in list(self._servers):
            self.drop(host)
        self._here.close()


def copy_hosts(peers: Sequence[str], copies: int, failures: Mapping[str, int]) -> List[str]:
    """Return the hosts that keep copies of a checkpoint, besides the coordinator's.

    A host keeps its copies until it fails: it is replaced by the next one then, and used again once the others have
    failed as often.

    Args:
        peers: the hosts that can be used, in the order of the cluster from the coordinator's host on.
        copies: the number of hosts that keep the checkpoint, with the coordinator's.
        failures: how often a transfer to a host has failed.
    """
    return sorted(peers, key=lambda host: failures.get(host, 0))[: copies - 1]


_LINES = ".jsonl"


@dataclasses.dataclass(frozen=True)
class Source:
    """What is sent: a checkpoint, and the run folder as it is at one moment."""

    run_dir: Path
    checkpoint: Checkpoint
    tensors: Dict[str, FilePart]
    files: Dict[str, FilePart]
    state: bytes  # of state.json: a run that was interrupted after the checkpoint

    @property
    def age(self) -> Age:
        """The generation and update, which order the checkpoints of a run."""
        return self.checkpoint.manifest.generation, self.checkpoint.update


def run_id(run_dir: Path) -> str:
    """Return the name of a run on other hosts, which stays the same when it resumes; choose one for a new run.

    Raises:
        OSError: it cannot be written into the run folder.
    """
    path = run_dir / layout.COPIES
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(parse_json(path.read_text())["run_id"])
    name = re.sub(r"[^A-Za-z0-9._-]", "_", run_dir.resolve().name).lstrip(".")[:60]
    chosen = f"{name or 'run'}-{uuid.uuid4().hex[:8]}"
    _write_run_id(run_dir, chosen)
    return chosen


def _write_run_id(run_dir: Path, chosen: str) -> None:
    replace_file(run_dir / layout.COPIES, (json.dumps({"run_id": chosen}) + "\n").encode())


@contextlib.contextmanager
def open_source(run_dir: Path, path: Path, folder: Optional[Path] = None) -> Iterator[Source]:
    """Open a checkpoint and the files of its run, which are in `folder` (default: the run folder).

    Raises:
        CheckpointDamaged: its manifest cannot be read.
        OSError: a file is missing, as if the checkpoint was removed meanwhile.
    """
    with contextlib.ExitStack() as stack:
        checkpoint = storage.read_manifest(path)
        tensors, files = storage.open_files(checkpoint, stack), {}
        for name in layout.names("copy"):
            with contextlib.suppress(FileNotFoundError):
                file = stack.enter_context(((folder or run_dir) / name).open("rb"))
                size_bytes = os.fstat(file.fileno()).st_size
                # The last line may be one that is being written.
                files[name] = FilePart(file, line_begin(file, size_bytes) if name.endswith(_LINES) else size_bytes)
        yield Source(run_dir, checkpoint, tensors, files, _interrupted_state(folder or run_dir, checkpoint))


def send_source(server: Server, source: Source, run: str, timeout_s: float, is_abandoned: Callable[[], bool]) -> None:
    """Send a copy within a timeout. It is complete on the other host's disk, and verified there, or absent.

    Raises:
        OSError: the other host's file system, or it does not respond.
        Abandoned: `is_abandoned()` has returned true.
    """
    deadline_s = time.monotonic() + timeout_s
    manifest = source.checkpoint.manifest
    sender = CheckpointSender(server, manifest.update, timeout_s)
    for name, part in source.tensors.items():
        with sender.new_file(name) as target:
            for data in _chunks(part, is_abandoned):
                target.write(data)
    sender.commit(manifest, Retention(1))
    requests = Requests(server, max(0.0, deadline_s - time.monotonic()))
    expected = {layout.STATE: hashlib.sha256(source.state).hexdigest()}
    requests.add("write_file", layout.STATE, source.state)
    for name, part in source.files.items():
        digest = hashlib.sha256()
        requests.add("write_file", name, b"")  # an empty file is a file, too
        for data in _chunks(part, is_abandoned):
            digest.update(data)
            requests.add("write_file", name, data)
        expected[name] = digest.hexdigest()
    facts: Dict[str, Any] = {
        "run_id": run,
        "run_dir": str(source.run_dir),
        "checkpoint": source.checkpoint.path.name,
        "raypod": event_log.raypod_version(),
        "written_unix_s": time.time(),
    }
    requests.add("finish", facts, expected)
    requests.finish()


def _chunks(part: FilePart, is_abandoned: Callable[[], bool]) -> Iterator[bytes]:
    """Read the part of a file in pieces; less if the file was truncated, which the receiver finds."""
    for data in part.chunks(transfer.CHUNK_BYTES):
        if is_abandoned():
            raise Abandoned
        yield data


def _interrupted_state(run_dir: Path, checkpoint: Checkpoint) -> bytes:
    """Return the content of `state.json` of a run that was interrupted after a checkpoint.

    On another host, a run whose state has no end counts as running.
    """
    state = run_state.read(run_dir)
    if state is None:
        raise FileNotFoundError(f"{run_dir} has no readable {layout.STATE}")
    ended = dataclasses.replace(
        state,
        state=run_state.INTERRUPTED,
        exit_code=INTERRUPTED,
        update=checkpoint.update,
        status_port=None,
        status_token_file=None,
        submission_id=None,
        message="a copy of --checkpoint-copies",
    )
    return (strict_json(dataclasses.asdict(ended)) + "\n").encode()
