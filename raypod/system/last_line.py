"""Lines of a log file: the last one that this process and its children wrote, and those of exceptions and faults."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Optional

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
