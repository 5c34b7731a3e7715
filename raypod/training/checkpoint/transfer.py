"""Checkpoints between hosts without a shared disk: to and from the coordinator's host.

A process on the coordinator's host serves a `CheckpointReceiver` or a `CheckpointFiles`; the instance calls its
methods through a `Server`. Files are sent in chunks, a few at a time, and hashed on both sides; a received checkpoint
is read again from the disk before it is committed. Does not import torch.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from pathlib import Path
from typing import Any, Deque, Dict, Generator, Iterator, List, Tuple, Union

from typing_extensions import Protocol

from raypod.errors import CheckpointDamaged
from raypod.system.files import NewFile, new_file
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
