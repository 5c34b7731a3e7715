"""Log files: the times of their lines, their last line, and the lines of exceptions and faults.

`instance-0.times` belongs to `instance-0.log`. Each line of it is a mark: a time in seconds since 1970, and the size in
bytes that the log had then. What stands before that offset was written before that time, and the rest after it.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import re
import time
from pathlib import Path
from typing import List, NamedTuple, Optional

from raypod.system.files import open_to_append

_TAIL_BYTES = 4096
_MAX_CHARACTERS = 500
# The lines of the C++ runtime, and the line of Ray's handler in a Ray worker, which ends with a stack frame.
_TERMINATE = re.compile(r"terminate called (?:after throwing an instance of|without an active exception|recursively).*")
_WHAT = re.compile(r"\s+what\(\):\s.*")
_OF_RAY = re.compile(r"\[.*Unhandled exception: \S+ (what\(\): .*?)(?: \S+\(\S*\) \[0x[0-9a-f]+\].*)?")
# A fault: the lines of faulthandler, which Ray enables in its workers, and the line of Ray's own handler.
_FATAL = re.compile(r"Fatal Python error: (.+)")
_FRAME = re.compile(r"  File \"(.+)\", line (\d+) in (.+)")
_SIGNAL = re.compile(r"\*\*\* (SIG[A-Z]+) received at .*")
_BUS_ERROR = ": a memory-mapped file was truncated, or its disk is full or gone"


class LastLine:
    """The last line of a log file that is not blank, of what was appended since this object was created."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self.forget()

    def forget(self) -> None:
        """Ignore everything written so far."""
        self._line: Optional[str] = None
        self._begin = self._read_bytes = _size(self._log)

    def read(self) -> Optional[str]:
        """Return the line, at most 500 characters; None if there is none. Costs one `stat` if the log did not grow."""
        size = _size(self._log)
        if size != self._read_bytes:
            if size < self._read_bytes:  # truncated
                self._begin, self._line = 0, None
            self._read_bytes = size
            self._line = last_line(self._tail(size).decode(errors="replace"))[:_MAX_CHARACTERS] or self._line
        return self._line

    def _tail(self, size: int) -> bytes:
        begin = max(self._begin, size - _TAIL_BYTES)
        try:
            descriptor = os.open(str(self._log), os.O_RDONLY)
        except OSError:
            return b""
        try:
            return os.pread(descriptor, size - begin, begin)
        finally:
            os.close(descriptor)


def last_line(text: str) -> str:
    """Return the last line that is not blank, without space around it; "" if there is none."""
    # A progress bar overwrites its line: str.splitlines also splits at the carriage return.
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # does not exist yet, or the disk is gone
        return 0


def last_exception(text: str) -> Optional[str]:
    """Return the last line about an uncaught C++ exception, which contains its message; None if there is none."""
    for line in reversed(text.splitlines()):
        found = _OF_RAY.fullmatch(line) or _WHAT.fullmatch(line) or _TERMINATE.fullmatch(line)
        if found is not None:
            return " ".join((found.group(1) if found.re is _OF_RAY else line).split())[:_MAX_CHARACTERS]
    return None


def last_fault(text: str) -> Optional[str]:
    """Return the last fault, as in `segmentation fault in f, file.py line 7`, with the innermost Python function."""
    lines = text.splitlines()
    for index in range(len(lines) - 1, -1, -1):
        found = _FATAL.fullmatch(lines[index])
        if found is not None:
            frames = (_FRAME.fullmatch(line) for line in lines[index + 1 :])
            frame = next((each for each in frames if each is not None), None)
            place = f" in {frame.group(3)}, {frame.group(1)} line {frame.group(2)}" if frame else ""
            kind = f"{found.group(1)[:1].lower()}{found.group(1)[1:]}"
            return f"{kind}{place}{_BUS_ERROR if kind == 'bus error' else ''}"[:_MAX_CHARACTERS]
        signal = _SIGNAL.fullmatch(lines[index])
        if signal is not None:
            return f"signal {signal.group(1)}"
    return None


_INTERVAL_S = 2.0  # between two marks; no mark is written for a log that has not grown


class Mark(NamedTuple):
    """The size of a log at a time."""

    unix_s: float
    size_bytes: int


class LogTimes:
    """Writes the marks of a log file, for as long as this process appends to it."""

    def __init__(self, log: Path) -> None:
        self._log, self._path = log, times_file(log)
        self._marked_s, self._marked_bytes = -_INTERVAL_S, -1

    def mark(self) -> None:
        """Write a mark if the log has changed and the last mark is not recent; cheap otherwise.

        A mark that cannot be written is left out: then the times of the log are less precise.
        """
        now_s = time.monotonic()
        if now_s - self._marked_s < _INTERVAL_S:
            return
        self._marked_s = now_s
        with contextlib.suppress(OSError):
            size = self._log.stat().st_size
            if size != self._marked_bytes:
                descriptor = open_to_append(self._path)
                try:
                    os.write(descriptor, f"{time.time():.3f} {size}\n".encode())
                finally:
                    os.close(descriptor)
                self._marked_bytes = size


def times_file(log: Path) -> Path:
    """Return the file with the marks of a log."""
    return log.with_suffix(".times")


def read_marks(log: Path) -> List[Mark]:
    """Return the marks of a log, oldest first; [] without any. Those from before a truncation are left out."""
    try:
        lines = times_file(log).read_bytes().splitlines()
    except OSError:
        return []
    marks: List[Mark] = []
    for line in lines:
        mark = _parse(line)
        if mark is not None:
            while marks and marks[-1].size_bytes > mark.size_bytes:
                marks.pop()
            marks.append(mark)
    return marks


def offset_at(marks: List[Mark], unix_s: float) -> int:
    """Return an offset at or before which all output up to a time stands; the mark before that time decides."""
    at = bisect.bisect_right([mark.unix_s for mark in marks], unix_s)
    return marks[at - 1].size_bytes if at else 0


def time_of(sizes: List[int], marks: List[Mark], offset: int) -> Optional[float]:
    """Return a time before which the byte before `offset` was written; None if it was written after the last mark.

    `sizes` are those of the marks: a caller with many offsets makes the list once.
    """
    at = bisect.bisect_left(sizes, offset)
    return marks[at].unix_s if at < len(marks) else None


def _parse(line: bytes) -> Optional[Mark]:
    try:
        unix_s, size = line.split()
        return Mark(float(unix_s), int(size))
    except ValueError:  # truncated
        return None
