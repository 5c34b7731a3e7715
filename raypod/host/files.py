"""Writing that survives: every write of a checkpoint and of the files that a run appends to goes through here.

What is written beside and renamed is whole or absent, at a kill as at a power loss: files are flushed to the disk
before they are renamed, and so is the folder that holds their names.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any, Iterator, Optional, Union

from raypod.errors import WaitTimedOut

_CHUNK_BYTES = 8 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
Bytes = Union[bytes, memoryview]


class HashedFile:
    """A file under construction: counts and hashes what is written to it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._digest = hashlib.sha256()
        self.size_bytes = 0

    @property
    def sha256(self) -> str:
        """Of what has been written so far."""
        return self._digest.hexdigest()

    def write(self, data: Bytes) -> None:
        """Append. OSError as the disk says it."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        for first in range(0, len(view), _CHUNK_BYTES):
            chunk = view[first : first + _CHUNK_BYTES]
            _write_all(self._descriptor, chunk)
            self._digest.update(chunk)
        self.size_bytes += len(view)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[HashedFile]:
    """A new file, on the disk when the block has ended."""
    descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        yield HashedFile(descriptor)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Let `path` hold `data`: the old content or the new one, never a part."""
    partial = path.with_name(path.name + ".partial")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(str(partial))  # noqa: PTH108 - all calls of this file go through os
    try:
        with new_file(partial) as file:
            file.write(data)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(str(partial))  # noqa: PTH108
        raise
    os.replace(str(partial), str(path))  # noqa: PTH105
    sync_folder(path.parent)


def rename_folder(source: Path, target: Path) -> None:
    """Give a finished folder its name, and keep that on the disk too."""
    sync_folder(source)
    os.rename(str(source), str(target))  # noqa: PTH104
    sync_folder(target.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder, first under a name by which nobody looks for it: a half removed one is never found."""
    removed = path.with_name(path.name + ".removed")
    shutil.rmtree(str(removed), ignore_errors=True)
    os.rename(str(path), str(removed))  # noqa: PTH104
    shutil.rmtree(str(removed), ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(str(path), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AppendedFile:
    """A file that only grows; what is added is with the system when `write` returns.

    A full disk does not end the run: additions wait in memory and are written as soon as there is room.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._waiting = bytearray()

    def write(self, addition: bytes) -> None:
        """Append."""
        self._waiting += addition
        self._drain()

    def sync(self) -> None:
        """Everything on the disk, if there is room for it."""
        self._drain()
        if not self._waiting:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """The last try. OSError if additions could not be written."""
        try:
            if self._waiting:
                _write_all(self._descriptor, memoryview(bytes(self._waiting)))
                self._waiting.clear()
        finally:
            os.close(self._descriptor)

    def _drain(self) -> None:
        while self._waiting:
            try:
                written = os.write(self._descriptor, bytes(self._waiting))
            except OSError as error:
                if error.errno in _FULL:
                    return
                raise
            del self._waiting[:written]


class AppendedLines(AppendedFile):
    """The same for lines of text."""

    def add(self, line: str) -> None:
        """Append a line (without its end)."""
        self.write(line.encode() + b"\n")


def _write_all(descriptor: int, data: memoryview) -> None:
    while len(data):
        written = os.write(descriptor, data)
        data = data[written:]


# --- from file_lock: One process at a time, on one host or on several that share a file system: a lock that ends with its holder.

_LOOK_EVERY_S = 0.05


@contextlib.contextmanager
def locked(path: Path, timeout_s: float, setting: str) -> Iterator[None]:
    """Hold the lock file `path`, which is made where it is missing and stays.

    Raises:
        WaitTimedOut: somebody else holds it longer than `timeout_s`, which the config key `setting` sets.
        OSError: the file cannot be made.
    """
    deadline = time.monotonic() + timeout_s
    with path.open("a") as file:
        while not _taken(file.fileno()):
            if time.monotonic() > deadline:
                raise WaitTimedOut(f"the lock {path}, which another process holds", timeout_s, setting)
            time.sleep(_LOOK_EVERY_S)
        yield  # closing the file gives the lock back


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --- from record.plain_json: JSON that every program reads: a number that is none (NaN, infinity) is null.


def plain_json(content: Any, indent: Optional[int] = None) -> str:
    """`json.dumps`, without Python's own words for numbers that JSON does not have."""
    return json.dumps(_plain(content), indent=indent, allow_nan=False)


def _plain(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _plain(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_plain(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
