"""The last line that this process, and its child processes, have written to a log file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Optional

_TAIL_BYTES = 4096
_MAX_CHARACTERS = 500


class LastLine:
    """The last line of a log file that is not blank, of what was appended since this object was created."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self.forget()

    def forget(self) -> None:
        """Let the lines so far count no more."""
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
