"""The log files of a run folder, and their lines with the times at which they were written."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Dict, FrozenSet, Iterator, List, Optional, Tuple

from raypod.host.log_times import read_marks, time_of
from raypod.logs.since import offset_of_tail, offset_since
from raypod.record.growing_file import GrowingFile

COORDINATOR, EVENTS = "coordinator", "events"  # labels
_INSTANCE_LOG = re.compile(r"instance-(\d+)\.log")
_READ_BYTES = 1 << 16  # also the longest line; a longer one is printed in pieces

TimedLine = Tuple[float, bytes]


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
