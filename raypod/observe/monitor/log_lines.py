"""The last lines of log files that grow."""

from __future__ import annotations

import collections
import contextlib
from pathlib import Path
from typing import Deque, Dict, List, Optional

from raypod.observe.monitor.style import clean, clean_line
from raypod.runs.growing_file import GrowingFile

_TAIL_BYTES = 65536  # are read of a file at first
_KEPT = 1000  # lines


class LogTail:
    """The newest lines of a file, oldest first; empty while it does not exist."""

    def __init__(self, path: Path, kept: int = _KEPT, tail_bytes: int = _TAIL_BYTES) -> None:
        self._lines: Deque[str] = collections.deque(maxlen=kept)
        self._is_cut = False
        begin = 0
        with contextlib.suppress(OSError):
            begin = max(0, path.stat().st_size - tail_bytes)
            self._is_cut = begin > 0
        self._file = GrowingFile(path, begin, max_bytes=1 << 20)

    def lines(self) -> List[str]:
        """Read what is new; return the newest lines."""
        with contextlib.suppress(OSError):  # removed, or not readable
            new, restarted = self._file.read()
            if restarted:
                self._lines.clear()
            elif self._is_cut and new:
                new, self._is_cut = new[1:], False  # the first one is incomplete
            self._lines.extend(clean_line(line.decode(errors="replace")) for line in new)
        return list(self._lines)

    def close(self) -> None:
        """Nothing is open between two reads."""


class LastLines:
    """The last line that is not empty, of several files."""

    def __init__(self) -> None:
        self._tails: Dict[str, LogTail] = {}

    def of(self, path: Optional[str], since_s: float = 0.0) -> Optional[str]:
        """Return the last line of a file; None if there is none, or if nothing was written since a Unix time."""
        if not path or not _is_newer(path, since_s):
            return None
        tail = self._tails.get(path)
        if tail is None:
            tail = self._tails[path] = LogTail(Path(path), kept=20, tail_bytes=4096)
        return next((clean(line) for line in reversed(tail.lines()) if line), None)


def _is_newer(path: str, since_s: float) -> bool:
    try:
        return Path(path).stat().st_mtime >= since_s
    except OSError:
        return False
