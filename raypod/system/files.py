"""Files and folders: atomic replacement, new and append-only files, a lock file, JSON, and a folder that is held open.

Files that are replaced or renamed are complete or absent after a kill or a power loss: their content is flushed to disk
before the rename, and the folder entry after it. Nothing is written where a folder that this process holds was before
its disk was unmounted: OSError of `check`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import json
import math
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Union

from raypod.errors import WaitTimedOut

_CHUNK_BYTES = 8 << 20
_SYNC_FILE_RANGE_WRITE = 2  # of linux/fs.h
_MOST_UNFLUSHED_BYTES = 4 << 20
_CLOSING_ATTEMPTS = 3
_LOCK_POLL_S = 0.05
_MOST_LEVELS = 100  # of lists and objects in each other
_TOO_DEEP = "it is nested too deeply"
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{\]}]')  # of JSON: strings, whose brackets do not count, and brackets
_STEPS = {"{": 1, "[": 1, "]": -1, "}": -1}
Bytes = Union[bytes, memoryview]
_ATTEMPTS = 20
_held: List[HeldFolder] = []  # of this process


class FilePart(NamedTuple):
    """The first `size_bytes` bytes of an open file, which may grow, be replaced or be removed meanwhile."""

    file: BinaryIO
    size_bytes: int

    def chunks(self, chunk_bytes: int = 1 << 20) -> Iterator[bytes]:
        """Yield the bytes in order; fewer if the file was truncated."""
        self.file.seek(0)
        left = self.size_bytes
        while left:
            data = self.file.read(min(chunk_bytes, left))
            if not data:
                return
            left -= len(data)
            yield data


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
    check_held(path)
    descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    written = flushed = 0

    def append(data: memoryview) -> None:
        nonlocal written, flushed
        left = data
        while len(left):
            left = left[os.write(descriptor, left) :]
        written += len(data)
        if _sync_file_range is not None and written - flushed >= _CHUNK_BYTES:
            # Starts to write, without waiting for the disk, which works while the rest is copied to the page cache.
            _sync_file_range(descriptor, flushed, written - flushed, _SYNC_FILE_RANGE_WRITE)
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
            _replace(path, FilePart(file, size).chunks())


def _replace(path: Path, content: Iterable[bytes]) -> None:
    """Set the content of a file atomically to that of all parts."""
    check_held(path)
    partial = path.with_name(path.name + ".partial")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(str(partial))  # noqa: PTH108 - tests inject faults into these functions of os
    try:
        with new_file(partial) as file:
            for data in content:
                file.write(data)
    except BaseException:  # also an interruption
        with contextlib.suppress(OSError):
            os.unlink(str(partial))  # noqa: PTH108
        raise
    rename_file(partial, path)


def rename_file(source: Path, target: Path) -> None:
    """Rename a complete file, which replaces `target`, durably."""
    check_held(target)
    os.replace(str(source), str(target))  # noqa: PTH105
    sync_folder(target.parent)


def rename_folder(source: Path, target: Path) -> None:
    """Rename a complete folder durably."""
    check_held(target)
    sync_folder(source)
    os.rename(str(source), str(target))  # noqa: PTH104
    sync_folder(target.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder. It is renamed first, so that a partly removed folder never has its name."""
    check_held(path)
    removed = path.with_name(path.name + ".removed")
    shutil.rmtree(str(removed), ignore_errors=True)
    os.rename(str(path), str(removed))  # noqa: PTH104
    shutil.rmtree(str(removed), ignore_errors=True)


def make_folder(path: Path) -> None:
    """Create a folder durably, but not its parents, unless it exists."""
    check_held(path)
    if not path.is_dir():
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def open_to_append(path: Path) -> int:
    """Return the descriptor of a file, which is created if needed, whose writes go to its end."""
    check_held(path)
    return os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def sync_folder(path: Path) -> None:
    """Flush the entries of a folder to disk."""
    sync_file(path)


def sync_file(path: Path) -> None:
    """Flush the content of a file that another function has written to disk."""
    descriptor = os.open(str(path), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AppendOnlyFile:
    """A file that only grows. `write` passes data to the operating system immediately.

    No error of the disk ends the process that writes. What cannot be written (the disk is full, an I/O error) is kept
    in memory, and written with what follows. What cannot be flushed to disk may be lost although it was written: it is
    written again. For that the data since the last flush is kept, at most 4 MiB: then it is flushed.
    """

    def __init__(self, path: Path, warn: Callable[[str], None] = lambda text: None) -> None:
        """Open the file. OSError if that fails. `warn` gets one line when errors begin."""
        self.path, self._warn = path, warn
        self._descriptor = open_to_append(path)
        self._unwritten, self._unflushed = bytearray(), bytearray()
        self._flushed_bytes = os.fstat(self._descriptor).st_size  # what the file had before counts as flushed
        self._has_warned = False

    @property
    def has_unwritten(self) -> bool:
        """Whether data is kept in memory."""
        return bool(self._unwritten)

    def write(self, data: bytes) -> None:
        self._unwritten += data
        self._drain()
        if len(self._unflushed) >= _MOST_UNFLUSHED_BYTES:
            self.sync()

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

    def copy_to(self, path: Path) -> None:
        """Write what the file has, and what is kept in memory, into another one. OSError as from the file systems.

        It is read without its path, which leads elsewhere after its disk was unmounted.
        """
        with path.open("wb") as target:
            with contextlib.suppress(OSError), Path(f"/proc/self/fd/{self._descriptor}").open("rb") as source:
                shutil.copyfileobj(source, target)
            target.write(self._unwritten)

    def sync(self) -> None:
        """Flush everything to disk, if the disk permits."""
        if self._drain() is None and self._flush() is None:
            self._has_warned = False

    def close(self) -> None:
        """Write what is left, flush everything to disk and close the file. OSError if that fails repeatedly."""
        try:
            for left in reversed(range(_CLOSING_ATTEMPTS)):
                error = self._drain() or self._flush()
                if error is None:
                    return
                if not left:
                    raise error
        finally:
            os.close(self._descriptor)

    def _drain(self) -> Optional[OSError]:
        """Write what is kept; return the error of the disk."""
        while self._unwritten:
            try:
                written = os.write(self._descriptor, self._unwritten)
            except OSError as error:
                return self._failed(error)
            self._unflushed += self._unwritten[:written]
            del self._unwritten[:written]
        return None

    def _flush(self) -> Optional[OSError]:
        """Flush to disk what was written; if that fails, take it back and write it again. Return the error."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._take_back()
            self._drain()
            return self._failed(error)
        self._flushed_bytes += len(self._unflushed)
        self._unflushed.clear()
        return None

    def _take_back(self) -> None:
        size = os.fstat(self._descriptor).st_size
        if self._flushed_bytes <= size <= self._flushed_bytes + len(self._unflushed):
            os.ftruncate(self._descriptor, self._flushed_bytes)
            self._unwritten = self._unflushed + self._unwritten
        else:  # another process has changed the file: what it wrote must stay
            self._flushed_bytes = size
        self._unflushed = bytearray()

    def _failed(self, error: OSError) -> OSError:
        if not self._has_warned:
            self._has_warned = True
            cause = error.strerror or str(error)
            self._warn(f"cannot write {self.path} ({cause}); the run continues, and its lines are written later")
        return error


@contextlib.contextmanager
def file_lock(path: Path, timeout_s: float, setting: str) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, which is created if needed and not removed.

    It excludes processes on all hosts that share the file system, and ends with the process that holds it.

    Raises:
        WaitTimedOut: another process holds it for longer than `timeout_s`, which the config key `setting` sets.
        OSError: the file cannot be created.
    """
    deadline = time.monotonic() + timeout_s
    check_held(path)
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    what = f"the lock {path}, which another process holds"
                    raise WaitTimedOut(what, timeout_s, setting) from None
            time.sleep(_LOCK_POLL_S)
        yield  # closing the file releases the lock


def parse_json(text: Union[str, bytes]) -> Any:
    """Return the content of JSON text, of any author. ValueError if it is no JSON, or nested too deeply.

    The levels are counted before: Python 3.8 cannot always recover from the RecursionError of `json.loads`.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    if text.count("{") + text.count("[") > _MOST_LEVELS:
        steps = (_STEPS.get(token, 0) for token in _TOKENS.findall(text))
        if max(itertools.accumulate(steps)) > _MOST_LEVELS:
            raise ValueError(_TOO_DEEP)
    return json.loads(text)


def read_object(path: Path) -> Dict[str, Any]:
    """Return the JSON object in a file; {} if the file is missing, damaged or something else."""
    try:
        content = parse_json(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


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


# The function of the C library, which `os` does not have; None where the library does not have it either.
_sync_file_range: Any = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def create_folder(path: Path) -> List[Path]:
    """Create a folder and its missing parents durably; return the folders that this call has created, `path` last.

    Atomic: of several processes that create the same folder, one succeeds.

    Raises:
        FileExistsError: `path` exists.
        OSError: the file system's own.
    """
    created: List[Path] = []
    _create(path, created)
    return created


def create_numbered_folder(path: Path) -> List[Path]:
    """Create the first of the folders `path`, `path-2`, `path-3`, ... that does not exist; as `create_folder`."""
    created: List[Path] = []  # with the parents that were created before the name was found to be taken
    candidates = itertools.chain([path], (path.with_name(f"{path.name}-{number}") for number in itertools.count(2)))
    while True:
        with contextlib.suppress(FileExistsError):
            _create(next(candidates), created)
            return created


def _create(path: Path, created: List[Path]) -> None:
    """Create a folder and its missing parents, and append those that this call has created to `created`."""
    for attempt in itertools.count(1):
        for parent in reversed(path.parents):
            if not parent.exists():
                with contextlib.suppress(FileExistsError):
                    parent.mkdir()
                    created.append(parent)
        try:
            path.mkdir()
            break
        except FileNotFoundError:  # another process has removed an empty parent again
            if attempt == _ATTEMPTS:
                remove_empty(created)
                raise
    created.append(path)
    for folder in created:
        with contextlib.suppress(PermissionError):  # a folder that this user may write to, but not read
            sync_folder(folder.parent)


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders that are empty, the last first."""
    for folder in reversed(folders):
        with contextlib.suppress(OSError):  # not empty, or removed already
            folder.rmdir()


def looked_in(path: Path) -> str:
    """Return, for the message that a path does not exist, in which folder it was looked for: " in FOLDER" or ""."""
    return "" if path.is_absolute() else f" in {Path.cwd()}"


# A folder that this process has opened: nothing is written by its path once that leads to another folder, or to none.
#
# So it is after its disk was unmounted (`umount -l`), or the folder moved or removed. The functions above, through
# which a run writes, call `check_held` first.


class HeldFolder:
    """A folder and its descriptor, which knows it without its path."""

    def __init__(self, path: Path, mark: Optional[Path] = None) -> None:
        """Open the folder. A file `mark` in it proves that its path still leads there. OSError if it is not there."""
        self.path, self._mark = path, mark
        self._descriptor = os.open(str(path), os.O_RDONLY | os.O_DIRECTORY)
        _held.append(self)

    def is_elsewhere(self) -> bool:
        """Return whether the path leads to another folder, or to none, than when this was opened."""
        if self._mark is not None and os.path.lexists(str(self._mark)):
            return False
        try:
            return not os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # the disk does not answer
            return False

    def close(self) -> None:
        """Allow everything again. May be called repeatedly."""
        with contextlib.suppress(ValueError):
            _held.remove(self)
            os.close(self._descriptor)


def check_held(path: Path) -> None:
    """Raise OSError (ESTALE) if `path` is in a folder that this process holds, and that is elsewhere by now."""
    for each in list(_held):
        if each.path in (path, *path.parents) and each.is_elsewhere():
            raise OSError(errno.ESTALE, "the run folder is not there any more", str(path))


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a folder for the duration of the block. One that is not there is not held."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.callback(HeldFolder(path).close)
        yield
