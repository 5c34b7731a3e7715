"""The log files of a run folder, and their lines with the times at which they were written."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import re
import time
from pathlib import Path
from typing import Dict, FrozenSet, Iterator, List, Optional, Tuple

from raypod.errors import ConfigError
from raypod.runs.growing_file import GrowingFile, line_begin
from raypod.system.log_files import Mark, offset_at, read_marks, time_of

COORDINATOR, EVENTS = "coordinator", "events"  # labels
_INSTANCE_LOG = re.compile(r"instance-(\d+)\.log")
_READ_BYTES = 1 << 16  # also the longest line; a longer one is printed in pieces

TimedLine = Tuple[float, bytes]
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_BLOCK_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Selection:
    """What the user asked for."""

    instances: Optional[FrozenSet[int]]  # None: all instances, and the coordinator
    kinds: FrozenSet[str]  # of events
    since_s: Optional[float] = None  # since 1970
    tail: Optional[int] = None  # lines of each source

    def has(self, instance: Optional[int]) -> bool:
        """Return whether the output of an instance, or of the coordinator (None), is shown."""
        return self.instances is None or instance in self.instances


class LogSource:
    """A log file, read from the first line that the selection shows."""

    def __init__(self, label: str, log: Path, selection: Selection, begin: Optional[int] = None) -> None:
        """`begin` is the offset of the first line, else the selection determines it."""
        self.label, self._log = label, log
        self._file = GrowingFile(log, begin_of(log, selection) if begin is None else begin, _READ_BYTES)

    def timed_lines(self) -> Iterator[TimedLine]:
        """Yield the new lines, each with a time in seconds since 1970 before which it was written, in order."""
        marks = read_marks(self._log)
        sizes = [mark.size_bytes for mark in marks]
        while True:
            position = self._file.position
            lines, restarted = self._file.read()
            if not lines:
                return
            position = 0 if restarted else position
            modified_s = self._log.stat().st_mtime
            for line in lines:
                position += len(line) + 1
                known_s = time_of(sizes, marks, position)
                yield (modified_s if known_s is None else known_s), line

    def new_lines(self) -> Iterator[bytes]:
        """Yield the new lines."""
        while True:
            lines = self._file.read().lines
            if not lines:
                return
            yield from lines

    def rest(self) -> bytes:
        """Return the last line, if it has no newline."""
        return self._file.read_rest()


def begin_of(log: Path, selection: Selection) -> int:
    """Return the offset of the first line of a log that a selection shows."""
    begin = 0
    if selection.since_s is not None:
        begin = offset_since(log, read_marks(log), selection.since_s)
    if selection.tail is not None:
        begin = max(begin, offset_of_tail(log, selection.tail))
    return begin


def logs_in(folder: Path, selection: Selection) -> Dict[str, Path]:
    """Return the selected log files of a run folder by label, the coordinator's first, then by instance."""
    found: List[Tuple[int, str, Path]] = []
    for path in (folder / "logs").glob("*.log"):
        matched = _INSTANCE_LOG.fullmatch(path.name)
        instance = int(matched.group(1)) if matched else None
        if selection.has(instance) and (matched or path.stem == COORDINATOR):
            found.append((-1 if instance is None else instance, label_of(instance), path))
    return {label: path for _, label, path in sorted(found)}


def label_of(instance: Optional[int], host: str = "") -> str:
    """Return the label of an instance's output, with the host if it was fetched from there."""
    return COORDINATOR if instance is None else f"instance {instance}{'@' if host else ''}{host}"


def parse_since(text: str) -> float:
    """Return the time that `--since` names, in seconds since 1970.

    Args:
        text: an age (`90s`, `10m`, `2h`, `1d`), a time in ISO 8601 (local time without a zone), or seconds since 1970.

    Raises:
        ConfigError: the text is none of them.
    """
    age = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if age:
        return time.time() - float(age.group(1)) * _UNITS_S[age.group(2)]
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if math.isfinite(seconds) and seconds >= 0:
        return seconds
    try:
        return datetime.datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text)).timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(
            f"--since {text}: must be an age such as 10m or 2h, a time such as 2026-01-31T08:00, or seconds since 1970"
        ) from None


def offset_since(log: Path, marks: List[Mark], unix_s: float) -> int:
    """Return the offset of the line at which the output since a time begins; without marks 0, or the end of an old log.

    Lines of a few seconds before that time can follow it: marks are some seconds apart.
    """
    facts = log.stat()
    if facts.st_mtime < unix_s:
        return facts.st_size
    with log.open("rb") as file:
        return line_begin(file, offset_at(marks, unix_s))


def offset_of_tail(log: Path, lines: int) -> int:
    """Return the offset at which the last lines of a file begin; a last line without a newline counts."""
    with log.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        if end == 0 or lines == 0:
            return end
        file.seek(end - 1)
        left = lines + (file.read(1) == b"\n")  # newlines to find; the one before the first of these lines is the last
        position = end
        while position > 0:
            size = min(_BLOCK_BYTES, position)
            position -= size
            file.seek(position)
            block = file.read(size)
            if block.count(b"\n") < left:
                left -= block.count(b"\n")
                continue
            at = len(block)
            for _ in range(left):
                at = block.rfind(b"\n", 0, at)
            return position + at + 1
    return 0
