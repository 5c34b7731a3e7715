"""Lines of several sources on one stream, each with a prefix that names its source, coloured on a terminal."""

from __future__ import annotations

import os
import select
import sys
import time
from typing import BinaryIO, Dict, Iterable

from raypod.cli import printable

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # of ANSI: cyan, yellow, green, magenta, blue, and bright ones
_BOLD = 1


class Printer:
    """Writes lines to stdout; BrokenPipeError when its reader is gone."""

    def __init__(self, labels: Iterable[str]) -> None:
        """`labels` are those of the sources that are known; their prefixes have equal widths."""
        self._out: BinaryIO = sys.stdout.buffer
        self._is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._width = max(map(len, labels), default=0)
        self._prefixes: Dict[str, bytes] = {}

    def line(self, label: str, text: bytes) -> None:
        """Print one line; of a progress bar, which redraws its line with carriage returns, the last state."""
        prefix = self._prefixes.get(label)
        if prefix is None:
            prefix = self._prefixes[label] = self._prefix(label)
        self._out.write(prefix + printable(_last_state(text).decode(errors="replace")).encode() + b"\n")

    def flush(self) -> None:
        """Pass the lines to the reader."""
        self._out.flush()

    def wait(self, seconds: float) -> None:
        """Sleep. Raise BrokenPipeError as soon as the reader of stdout is gone, also if nothing is to be printed."""
        poll = select.poll()
        try:
            poll.register(self._out.fileno(), 0)  # errors are always reported
        except OSError:  # stdout is no descriptor
            time.sleep(seconds)
            return
        if any(happened & (select.POLLERR | select.POLLNVAL) for _, happened in poll.poll(seconds * 1000)):
            raise BrokenPipeError

    def _prefix(self, label: str) -> bytes:
        text = printable(f"{label:<{self._width}} | ")
        if not self._is_coloured:
            return text.encode()
        digits = "".join(filter(str.isdigit, label.split("@")[0]))
        colour = _COLOURS[int(digits) % len(_COLOURS)] if digits else _BOLD
        return f"\x1b[{colour}m{text}\x1b[0m".encode()


def _last_state(line: bytes) -> bytes:
    if b"\r" not in line:
        return line
    return next((state for state in reversed(line.split(b"\r")) if state.strip()), b"")
