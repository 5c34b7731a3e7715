"""The times of a log file: lines of output carry none, so a file beside the log maps times to offsets in it.

`instance-0.times` belongs to `instance-0.log`. Each line of it is a mark: a time in seconds since 1970, and the size in
bytes that the log had then. What stands before that offset was written before that time, and the rest after it.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import time
from pathlib import Path
from typing import List, NamedTuple, Optional

from raypod.system.files import open_to_append

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
