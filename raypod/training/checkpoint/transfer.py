"""Checkpoints between hosts without a shared disk: to and from the coordinator's host, and as copies on other hosts.

A process on the coordinator's host serves a `CheckpointReceiver` or a `CheckpointFiles`; the instance calls its
methods through a `Server`. Files are sent in chunks, a few at a time, and hashed on both sides; a received checkpoint
is read again from the disk before it is committed. Does not import torch.

Copies of a run's newest checkpoint on other hosts: which hosts keep them, and how one is written there.

A copy is a small run folder: the checkpoint, and the files with which the run continues and proves its data. It has its
name only when it is complete. `run.json` lists its files with their SHA-256, which `pod/host_copies.py` verifies with
Python alone, on a host without raypod. Does not import torch.

    ~/.raypod/copies/RUN_ID/000001-00000100/        generation and update: they order the copies of a run
        run.json  config.yaml  plan.json  metrics.jsonl  ledger.jsonl  ...
        checkpoints/update-00000100/
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections import deque
from pathlib import Path
from typing import (
    Any,
    Collection,
    Deque,
    Dict,
    Generator,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

from typing_extensions import Protocol

from raypod.errors import CheckpointDamaged
from raypod.plan.layout import CHECKPOINTS
from raypod.system import files
from raypod.system.files import NewFile, create_folder, new_file
from raypod.training.checkpoint import format, storage
from raypod.training.checkpoint.format import TENSOR_FILES, Checkpoint, FileRecord, Manifest, Retention

CHUNK_BYTES = 2 << 20
_IN_FLIGHT = 4  # requests; they hide the latency of the network and bound the memory for chunks
_Message = Union[Tuple[str, bytes], Manifest]


class Server(Protocol):
    """An object in a process on the coordinator's host. Instances get a copy, through which they call its methods."""

    def request(self, method: str, *arguments: Any) -> Any:
        """Start a method; return a handle for `result`. Methods run one after the other, in the order of requests."""

    def result(self, handle: Any, timeout_s: float) -> Any:
        """Return the result of a method, or raise its exception. OSError if it does not arrive within the timeout."""

    def close(self) -> None:
        """End the process."""


class CheckpointReceiver:
    """Writes the checkpoints that one instance sends into a folder of this host. Each is complete or absent."""

    def __init__(self, checkpoints: str) -> None:
        self._checkpoints = Path(checkpoints)
        self._receiving = _receive(self._checkpoints, 0)  # not started

    def begin(self, update: int) -> None:
        """Begin the checkpoint of `update`; discard one that was not committed."""
        self._receiving.close()
        self._receiving = _receive(self._checkpoints, update)
        next(self._receiving)

    def write(self, name: str, data: bytes) -> None:
        """Append bytes to a file of the checkpoint.

        Raises:
            OSError: the file system's own, for example on a full disk. The checkpoint is discarded.
        """
        self._receiving.send((name, data))

    def commit(self, manifest: Manifest, kept: Retention) -> Path:
        """Make the checkpoint the latest one, and remove those that are not kept. Return its folder.

        Raises:
            OSError: the file system's own, or the files differ from their records. The checkpoint is discarded.
        """
        self._receiving.send(manifest)
        storage.remove_old(self._checkpoints, kept)
        return storage.checkpoint_path(self._checkpoints, manifest.update)


class CheckpointFiles:
    """Reads the files of a checkpoint of this host."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def read(self, name: str, offset: int) -> bytes:
        """Return up to CHUNK_BYTES bytes of a file, from `offset` on."""
        with (self._path / _checked(name)).open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK_BYTES)


class Requests:
    """Requests to a server, a few of them at a time; all results arrive within a timeout, or OSError is raised."""

    def __init__(self, server: Server, timeout_s: float) -> None:
        self._server, self._deadline = server, time.monotonic() + timeout_s
        self._handles: Deque[Any] = deque()

    def add(self, method: str, *arguments: Any) -> List[Any]:
        """Start a method. Wait for an earlier one if too many are in progress; return its result, else nothing."""
        self._handles.append(self._server.request(method, *arguments))
        return self._results(_IN_FLIGHT)

    def finish(self) -> List[Any]:
        """Return the results of all methods that are still in progress, in order."""
        return self._results(0)

    def _results(self, left: int) -> List[Any]:
        results = []
        while len(self._handles) > left:
            remaining_s = max(0.0, self._deadline - time.monotonic())
            results.append(self._server.result(self._handles.popleft(), remaining_s))
        return results


class CheckpointSender:
    """Sends one checkpoint to a `CheckpointReceiver`. The methods raise OSError if that fails."""

    def __init__(self, server: Server, update: int, timeout_s: float) -> None:
        self._requests = Requests(server, timeout_s)
        self._requests.add("begin", update)

    @contextlib.contextmanager
    def new_file(self, name: str) -> Iterator[NewFile]:
        """Yield a file of the checkpoint. What is written to it has been sent at the end of the block."""
        pending = bytearray()

        def append(data: memoryview) -> None:
            while data:
                taken = CHUNK_BYTES - len(pending)
                pending.extend(data[:taken])
                data = data[taken:]
                if len(pending) == CHUNK_BYTES:
                    self._requests.add("write", name, bytes(pending))
                    pending.clear()

        yield NewFile(append)
        if pending:
            self._requests.add("write", name, bytes(pending))

    def commit(self, manifest: Manifest, kept: Retention) -> Checkpoint:
        """Wait until the checkpoint is written, with `manifest`, and those that are not kept are removed."""
        self._requests.add("commit", manifest, kept)
        return Checkpoint(self._requests.finish()[-1], manifest)


def fetch(server: Server, checkpoint: Checkpoint, folder: Path, timeout_s: float) -> None:
    """Copy the tensor files of a checkpoint that a `CheckpointFiles` reads into an empty folder of this host.

    Raises:
        CheckpointDamaged: a file differs from its record in the manifest.
        OSError: the file system's own, or the server's host does not respond within the timeout.
    """
    requests = Requests(server, timeout_s)
    for name, record in checkpoint.manifest.files.items():
        hashed, size_bytes = format.new_digest(record.algorithm), 0
        with new_file(folder / _checked(name)) as file:
            for data in _chunks(requests, name, record):
                file.write(data)
                hashed.update(data)
                size_bytes += len(data)
        if (size_bytes, hashed.hexdigest()) != (record.size_bytes, record.digest):
            raise CheckpointDamaged(str(checkpoint.path), f"{name} differs from its record in the manifest")


def _chunks(requests: Requests, name: str, record: FileRecord) -> Iterator[bytes]:
    """Request a file from a `CheckpointFiles`; yield its content in order."""
    for offset in range(0, record.size_bytes, CHUNK_BYTES):
        yield from requests.add("read", name, offset)
    yield from requests.finish()


def _receive(checkpoints: Path, update: int) -> Generator[None, _Message, None]:
    """Write a checkpoint from messages: (name, bytes) for the end of a file, the manifest as the last one."""
    with storage.new_checkpoint(checkpoints, update) as partial:
        received: Dict[str, NewFile] = {}
        with contextlib.ExitStack() as opened:
            while True:
                message = yield
                if isinstance(message, Manifest):
                    break
                name, data = message
                if name not in received:
                    received[name] = opened.enter_context(storage.new_file(partial, _checked(name)))
                received[name].write(data)
        _check_received(partial, message, list(received))
        storage.write_manifest(partial, message)
    yield


def _check_received(partial: Path, manifest: Manifest, names: List[str]) -> None:
    """ConnectionError unless the files on the disk are those of the manifest."""
    try:
        storage.verify(Checkpoint(partial, manifest))
    except CheckpointDamaged as error:
        raise ConnectionError(f"the received files differ from those that were sent ({error})") from None
    if set(names) != set(manifest.files):
        raise ConnectionError("the received files differ from those that were sent")


def _checked(name: str) -> str:
    if name not in TENSOR_FILES:
        raise ValueError(f"{name!r} is no file of a checkpoint")
    return name


FOLDER = "~/.raypod/copies"
INDEX, ENDED = "run.json", "ended"
_FORMAT = 1
_PARTIAL, _REMOVED, _MARK = ".partial", ".removed", ".host"
_NAME = re.compile(r"(\d{6,})-(\d{8,})$")
_RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*$")

Age = Tuple[int, int]  # generation and update


class Opened(NamedTuple):
    """What a host has: the newest copy of the run (None for none), and the mark of another host on the same disk."""

    held: Optional[Age]
    shares_with: Optional[str]


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


def copy_name(age: Age) -> str:
    """Return the name of the folder of a copy."""
    return f"{age[0]:06d}-{age[1]:08d}"


def held_copies(folder: Path) -> List[Tuple[Age, Path]]:
    """Return the complete copies of a run in its folder, newest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.match(path.name)
        if match and (path / INDEX).is_file():
            found.append(((int(match.group(1)), int(match.group(2))), path))
    return sorted(found, reverse=True)


class CopyReceiver:
    """Writes the copies of one run into a folder of this host, and keeps the newest one."""

    def __init__(self, folder: str, run_id: str) -> None:
        """`folder` is that of all runs, with a `~` of this host. ValueError for a `run_id` that is no name."""
        if not _RUN_ID.match(run_id):
            raise ValueError(f"{run_id!r} is no name of a run")
        self._folder = Path(folder).expanduser() / run_id
        self._partial = self._folder / f"copy{_PARTIAL}"
        self._checkpoint: Optional[CheckpointReceiver] = None
        self._manifest: Optional[Manifest] = None
        self._mark: Optional[Path] = None

    def open(self, mark: str, others: Collection[str]) -> Opened:
        """Leave a mark on the disk, unless one of the marks of `others` is there: it is the same disk then.

        Raises:
            OSError: the folder cannot be written.
        """
        with contextlib.suppress(FileExistsError):
            create_folder(self._folder)
        shared = [other for other in others if self._path_of(other).exists()]
        if shared:
            return Opened(None, shared[0])
        for left in self._folder.glob(f"*{_MARK}"):
            left.unlink()
        self._mark = self._path_of(mark)
        self._mark.touch()
        held = held_copies(self._folder)
        return Opened(held[0][0] if held else None, None)

    def begin(self, update: int) -> None:
        """Begin the copy of a checkpoint; discard one that was not completed. Its tensor files come first."""
        self.discard()
        create_folder(self._partial)
        self._checkpoint = CheckpointReceiver(str(self._partial / CHECKPOINTS))
        self._checkpoint.begin(update)

    def write(self, name: str, data: bytes) -> None:
        """Append bytes to a tensor file of the checkpoint. OSError as from the file system."""
        self._receiver().write(name, data)

    def commit(self, manifest: Manifest, kept: Retention) -> Path:
        """Verify the tensor files on this disk, and write the manifest. The files of the run follow.

        Raises:
            OSError: the file system's own, or the files differ from their records.
        """
        path, self._manifest = self._receiver().commit(manifest, kept), manifest
        return path

    def write_file(self, name: str, data: bytes) -> None:
        """Append bytes to a file of the run folder. OSError as from the file system."""
        if Path(name).name != name or name == INDEX:
            raise ValueError(f"{name!r} is no file of a run folder")
        with (self._partial / name).open("ab") as file:
            file.write(data)

    def finish(self, facts: Dict[str, Any], expected: Dict[str, str]) -> None:
        """Give the copy its name, and remove older ones.

        Args:
            facts: about the run, for `run.json`.
            expected: the SHA-256 of each file of the run folder, as it was sent.

        Raises:
            OSError: the file system's own, the files differ from those that were sent, or the host holds a newer copy.
        """
        assert self._manifest is not None, "commit comes first"
        age = (self._manifest.generation, self._manifest.update)
        before = held_copies(self._folder)
        if before and before[0][0] > age:
            raise FileExistsError(f"it holds a newer copy of this run, of generation {before[0][0][0]}")
        records = {name: self._record(name) for name in self._names()}
        for name, sha256 in expected.items():
            if records.get(name, {}).get("sha256") != sha256:
                raise ConnectionError(f"the received file {name} differs from the one that was sent")
        order = {"generation": age[0], "update": age[1]}
        index = {"format": _FORMAT, **facts, **order, "files": records}
        with files.new_file(self._partial / INDEX) as file:
            file.write((json.dumps(index, indent=2) + "\n").encode())
        target = self._folder / copy_name(age)
        if target.exists():
            files.remove_folder(target)
        files.rename_folder(self._partial, target)
        for _, old in before:
            if old != target:
                files.remove_folder(old)

    def end(self, age: Age) -> None:
        """Record that the run is complete with the copy of this age. OSError as from the file system."""
        files.replace_file(self._folder / ENDED, copy_name(age).encode())

    def discard(self) -> None:
        """Remove what a transfer that did not end has left."""
        self._checkpoint = self._manifest = None
        for left in (self._partial, *self._folder.glob(f"*{_REMOVED}")):
            shutil.rmtree(str(left), ignore_errors=True)

    def close(self) -> None:
        """Discard a copy that is not complete, and remove the mark."""
        self.discard()
        with contextlib.suppress(OSError):
            if self._mark is not None:
                self._mark.unlink()
            self._folder.rmdir()  # if there is no copy

    def _path_of(self, mark: str) -> Path:
        return self._folder / f"{mark}{_MARK}"

    def _receiver(self) -> CheckpointReceiver:
        assert self._checkpoint is not None, "begin comes first"
        return self._checkpoint

    def _names(self) -> List[str]:
        return sorted(path.relative_to(self._partial).as_posix() for path in self._partial.rglob("*") if path.is_file())

    def _record(self, name: str) -> Dict[str, Any]:
        """Flush a file to disk; return its size and hash, as they are on the disk."""
        path = self._partial / name
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return {"size_bytes": path.stat().st_size, "sha256": format.digest_of_file(path, format.SHA256)}
