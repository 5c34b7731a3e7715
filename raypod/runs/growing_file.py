"""Read the lines that were appended to a file since the previous read, or its last ones, while it is written."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, List, NamedTuple, Optional, Tuple

from raypod.system.files import parse_json

_MAX_BYTES = 64 << 20  # of one read
_TAIL_BYTES = 64 << 10  # of one read from the end


class NewLines(NamedTuple):
    """Complete lines without their newline; `restarted` if the file was replaced, so that they are its first ones."""

    lines: List[bytes]
    restarted: bool


class NewRecords(NamedTuple):
    """Records of a JSON Lines file; `restarted` as in `NewLines`."""

    records: List[Dict[str, Any]]
    restarted: bool


class GrowingFile:
    """Reads the complete lines of a file that grows. A file that is replaced or truncated is read from its beginning.

    `position` is the offset in bytes after the lines that were returned.
    """

    def __init__(self, path: Path, position: int = 0, max_bytes: int = _MAX_BYTES) -> None:
        """`max_bytes` bounds what one `read` returns, and so the memory; a longer line is returned in pieces."""
        self.path, self.position, self._max_bytes = path, position, max_bytes
        self._identity: Optional[Tuple[int, int]] = None  # device and inode

    def read(self) -> NewLines:
        """Return the lines since the previous read; none while the file does not exist. OSError if it is unreadable."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return NewLines([], False)
        with file:
            facts = os.fstat(file.fileno())
            identity, before = (facts.st_dev, facts.st_ino), self._identity
            restarted = facts.st_size < self.position or (before is not None and identity != before)
            self._identity = identity
            if restarted:
                self.position = 0
            file.seek(self.position)
            data = file.read(self._max_bytes)
        complete = data[: data.rfind(b"\n") + 1]
        if not complete and len(data) == self._max_bytes:
            self.position += len(data)
            return NewLines([data], restarted)
        self.position += len(complete)
        return NewLines(complete.split(b"\n")[:-1], restarted)

    def read_rest(self) -> bytes:
        """Return what follows the last line that was returned, for the last line of a file that has no newline."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.position)
                return file.read(self._max_bytes)
        except FileNotFoundError:
            return b""

    def read_records(self) -> NewRecords:
        """Return the records of new lines of JSON. null reads as NaN; lines that are no JSON object are skipped."""
        lines, restarted = self.read()
        return NewRecords(parse_records(lines), restarted)


class LastLine(NamedTuple):
    """A line from the end of a file, with its newline if it has one, and the offset of its end in bytes."""

    text: bytes
    end: int


def last_lines(path: Path) -> Iterator[LastLine]:
    """Yield the lines of a file from its last one back to its first one; none without a file.

    What is read depends on the lines that are taken, not on the size of the file.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        begin = file.seek(0, os.SEEK_END)
        tail = b""  # what was read and not yielded; it begins at `begin`
        while begin:
            size = min(_TAIL_BYTES, begin)
            begin -= size
            file.seek(begin)
            tail = file.read(size) + tail
            found = [line + b"\n" for line in tail.split(b"\n")]
            found[-1] = found[-1][:-1]  # what follows the last newline
            end = begin + len(tail)
            for line in reversed(found[1:] if begin else found):  # the first one may begin before
                if line:
                    yield LastLine(line, end)
                end -= len(line)
            tail = found[0]


def line_begin(file: BinaryIO, offset: int) -> int:
    """Return the offset of the line that contains the byte at `offset`, which is after the last newline before it."""
    while offset > 0:
        size = min(_TAIL_BYTES, offset)
        file.seek(offset - size)
        at = file.read(size).rfind(b"\n")
        if at >= 0:
            return offset - size + at + 1
        offset -= size
    return 0


def parse_records(lines: List[bytes]) -> List[Dict[str, Any]]:
    """Return the objects of lines of JSON. null at the top level reads as NaN; other lines are skipped."""
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            content = parse_json(line)
            if isinstance(content, dict):
                found.append({key: math.nan if value is None else value for key, value in content.items()})
    return found
