"""Durable file operations: atomic replacement, new and append-only files, a lock file, and JSON.

Files that are replaced or renamed are complete or absent after a kill or a power loss: their content is flushed to disk
before the rename, and the folder entry after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Optional, Union

from raypod.errors import WaitTimedOut

_CHUNK_BYTES = 8 << 20
_SYNC_FILE_RANGE_WRITE = 2  # of linux/fs.h
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LOCK_POLL_S = 0.05
_MOST_LEVELS = 100  # of lists and objects in each other
_TOO_DEEP = "it is nested too deeply"
Bytes = Union[bytes, memoryview]


class NewFile:
    """A file that is being written."""

    def __init__(self, append: Callable[[memoryview], object]) -> None:
        """`append` writes bytes (uint8 [bytes]) to the end of the file."""
        self._append = append

    def write(self, data: Bytes) -> None:
        """Append. OSError as from the file system or the connection."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        for first in range(0, len(view), _CHUNK_BYTES):
            self._append(view[first : first + _CHUNK_BYTES])


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[NewFile]:
    """Create a file; it is flushed to disk at the end of the block. FileExistsError if it exists."""
    descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    written = flushed = 0

    def append(data: memoryview) -> None:
        nonlocal written, flushed
        _write_all(descriptor, data)
        written += len(data)
        if written - flushed >= _CHUNK_BYTES:  # the disk writes while the rest of the file is copied to the page cache
            _start_flush(descriptor, flushed, written - flushed)
            flushed = written

    try:
        yield NewFile(append)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Set the content of a file atomically."""
    _replace(path, (data,))


def keep_beginning(path: Path, size: int) -> None:
    """Remove all but the first `size` bytes of a file atomically; a file that is no longer is left as it is."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > size:
            starts = range(0, size, _CHUNK_BYTES)
            _replace(path, (file.read(min(_CHUNK_BYTES, size - start)) for start in starts))


def _replace(path: Path, content: Iterable[bytes]) -> None:
    """Set the content of a file atomically to that of all parts."""
    partial = path.with_name(path.name + ".partial")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(str(partial))  # noqa: PTH108 - tests inject faults into these functions of os
    try:
        with new_file(partial) as file:
            for data in content:
                file.write(data)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(str(partial))  # noqa: PTH108
        raise
    rename_file(partial, path)


def rename_file(source: Path, target: Path) -> None:
    """Rename a complete file, which replaces `target`, durably."""
    os.replace(str(source), str(target))  # noqa: PTH105
    sync_folder(target.parent)


def rename_folder(source: Path, target: Path) -> None:
    """Rename a complete folder durably."""
    sync_folder(source)
    os.rename(str(source), str(target))  # noqa: PTH104
    sync_folder(target.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder. It is renamed first, so that a partly removed folder never has its name."""
    removed = path.with_name(path.name + ".removed")
    shutil.rmtree(str(removed), ignore_errors=True)
    os.rename(str(path), str(removed))  # noqa: PTH104
    shutil.rmtree(str(removed), ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Flush the entries of a folder to disk."""
    descriptor = os.open(str(path), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AppendOnlyFile:
    """A file that only grows. `write` passes data to the operating system immediately.

    While the disk is full, data is kept in memory; it is written as soon as there is space.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._unwritten = bytearray()

    @property
    def has_unwritten(self) -> bool:
        """Whether data is kept in memory."""
        return bool(self._unwritten)

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._unwritten += data
        self._drain()

    def write_line(self, line: str) -> None:
        """Append a line of text; `line` is without its newline."""
        self.write(line.encode() + b"\n")

    def end_line(self) -> None:
        """End the last line if it is truncated, so that it stays separate from the next one."""
        with self.path.open("rb") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    self.write(b"\n")

    def sync(self) -> None:
        """Flush everything to disk, unless the disk is full."""
        self._drain()
        if not self._unwritten:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Write what is left and close the file. OSError if it cannot be written."""
        try:
            if self._unwritten:
                _write_all(self._descriptor, memoryview(bytes(self._unwritten)))
                self._unwritten.clear()
        finally:
            os.close(self._descriptor)

    def _drain(self) -> None:
        while self._unwritten:
            try:
                written = os.write(self._descriptor, bytes(self._unwritten))
            except OSError as error:
                if error.errno in _DISK_FULL:
                    return
                raise
            del self._unwritten[:written]


@contextlib.contextmanager
def file_lock(path: Path, timeout_s: float, setting: str) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, which is created if needed and not removed.

    It excludes processes on all hosts that share the file system, and ends with the process that holds it.

    Raises:
        WaitTimedOut: another process holds it for longer than `timeout_s`, which the config key `setting` sets.
        OSError: the file cannot be created.
    """
    deadline = time.monotonic() + timeout_s
    with path.open("a") as file:
        while not _try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise WaitTimedOut(f"the lock {path}, which another process holds", timeout_s, setting)
            time.sleep(_LOCK_POLL_S)
        yield  # closing the file releases the lock


def parse_json(text: Union[str, bytes]) -> Any:
    """Return the content of JSON text, of any author. ValueError if it is no JSON, or nested too deeply."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    openings = ("{", "[") if isinstance(text, str) else (b"{", b"[")
    return content if sum(map(text.count, openings)) <= _MOST_LEVELS else check_depth(content)  # type: ignore[arg-type]


def check_depth(content: Any) -> Any:
    """Return parsed content; ValueError if it has too many levels for the functions that recurse over it."""
    level = [content]
    for _ in range(_MOST_LEVELS):
        nested = [each for each in level if isinstance(each, (dict, list)) and each]
        if not nested:
            return content
        level = [child for each in nested for child in (each.values() if isinstance(each, dict) else each)]
    raise ValueError(_TOO_DEEP)


def strict_json(content: Any, indent: Optional[int] = None) -> str:
    """Return JSON with NaN and infinity, which JSON does not have, replaced by null."""
    try:
        return json.dumps(content, indent=indent, allow_nan=False)
    except ValueError:  # they are rare, and the replacement takes longer than the rest
        return json.dumps(_replace_nonfinite(content), indent=indent, allow_nan=False)


def _replace_nonfinite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _replace_nonfinite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_replace_nonfinite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_all(descriptor: int, data: memoryview) -> None:
    while len(data):
        written = os.write(descriptor, data)
        data = data[written:]


def _start_flush(descriptor: int, first: int, count: int) -> None:
    """Start writing a range of a file [bytes] to disk, without waiting for it. `os.fsync` waits, and reports errors."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, first, count, _SYNC_FILE_RANGE_WRITE)


def _load_sync_file_range() -> Any:
    """The function of the C library, which `os` does not have; None where the library does not have it either."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_sync_file_range = _load_sync_file_range()
