"""The output of all instances: byte for byte into one log file per instance, and line by line onto one console.

The console tags each line with `[1,<instance>]<stdout>:`, as mpirun does, and never mixes lines of different instances
or streams. A progress bar (a line that a program redraws with carriage returns) of one chosen instance is drawn in
place on a terminal. Elsewhere it becomes plain lines: its last state, and for the chosen instance a state now and then.
A nested bar, for which a program moves the cursor down and up again, is treated the same way.
"""

from __future__ import annotations

import codecs
import os
import re
import shutil
import time
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from raypod.errors import ConfigError, RunError
from raypod.runtime.launcher.records import STDERR, STDOUT
from raypod.system.log_files import LogTimes, last_exception

LONGEST_LINE_BYTES = 8 << 20  # a longer line is split, so that memory stays bounded
_TAIL_BYTES = 4096
_BAR_STATE_S = 10.0  # without a terminal: time between two printed states of a progress bar
_REDRAW_S = 0.05
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Failed|Interrupt|Warning)(: .*)?")
_RANK = re.compile(r"^\[rank\d+\]: ")  # with which torch begins the lines of a traceback in a process group
_CONTROL = re.compile(rb"[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]")
_ERASE = b"\r\x1b[K"
_UP = b"\x1b[A"
_UP_AND_DOWN = re.compile(rb"(?:\x1b\[A)+\n+")
_NAMES = {STDOUT: b"stdout", STDERR: b"stderr"}

Source = Tuple[int, int]  # instance, STDOUT or STDERR


class Output:
    """Writes to new log files in a run folder and to the console; `only` is the instance that the console shows."""

    def __init__(self, folder: str, instances: int, console: Console, only: Optional[int] = None) -> None:
        self._folder, self._console, self._only = folder, console, only
        self._logs: Dict[int, int] = {}
        self._times = {instance: LogTimes(Path(self.log_file(instance))) for instance in range(instances)}
        self._tails: Dict[int, bytes] = {}  # the end of stderr
        try:
            for instance in range(instances):
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                self._logs[instance] = os.open(self.log_file(instance), flags, 0o644)
        except OSError as error:
            raise ConfigError(
                f"cannot write to the run folder {folder}: {error.strerror}; choose another --run-dir"
            ) from None

    def log_file(self, instance: int) -> str:
        """Return the path of an instance's log file."""
        return f"{self._folder}/logs/instance-{instance}.log"

    def add(self, instance: int, stream: int, data: bytes) -> None:
        """Add bytes of a program. Raise RunError if the log file cannot be written."""
        try:
            _write(self._logs[instance], data)
        except OSError as error:
            raise RunError(f"cannot write {self.log_file(instance)}: {error.strerror}") from None
        self._times[instance].mark()
        if stream == STDERR:
            self._tails[instance] = (self._tails.get(instance, b"") + data)[-_TAIL_BYTES:]
        if self._only in (None, instance):
            self._console.add(instance, stream, data)

    def last_exception(self, instance: int) -> Optional[str]:
        """Return the last line of an instance's stderr if it looks like a Python exception."""
        lines = self._tails.get(instance, b"").decode(errors="replace").split("\n")
        last = _RANK.sub("", next((line.strip() for line in reversed(lines) if line.strip()), ""))
        return last if _EXCEPTION.fullmatch(last) else None

    def last_cpp_exception(self, instance: int) -> Optional[str]:
        """Return the last line about an uncaught C++ exception at the end of an instance's stderr."""
        return last_exception(self._tails.get(instance, b"").decode(errors="replace"))

    def flush(self) -> None:
        """Print the complete lines."""
        self._console.flush()

    def close(self) -> None:
        """Print the rest and close the log files. Idempotent."""
        try:
            self._console.close()
        finally:
            for descriptor in self._logs.values():
                os.close(descriptor)
            self._logs = {}


def tag(source: Source) -> bytes:
    """Return the prefix of each line of an instance's stream."""
    return b"[1,%d]<%s>:" % (source[0], _NAMES[source[1]])


class Console:
    """Writes to two descriptors, stdout and stderr; draws the progress bar of `bar_instance` in place."""

    def __init__(self, out: int = 1, err: int = 2, bar_instance: int = 0) -> None:
        self._descriptors = {STDOUT: out, STDERR: err}
        self._is_terminal = {stream: os.isatty(number) for stream, number in self._descriptors.items()}
        self._bar_instance = bar_instance
        self._partial: Dict[Source, bytearray] = {}
        self._ready: Dict[int, List[bytes]] = {STDOUT: [], STDERR: []}
        self._bar: Optional[Source] = None  # the source whose partial line is drawn in place
        self._drawn = b""
        self._drawn_s = self._printed_s = 0.0

    def add(self, instance: int, stream: int, data: bytes) -> None:
        """Add bytes of a program; `flush` prints the complete lines."""
        source = (instance, stream)
        before = self._partial.pop(source, bytearray())
        data = _without_cursor_moves(bytes(before[-len(_UP) :]), data)
        lines, newline, rest = data.rpartition(b"\n")
        if newline:
            self._queue(source, bytes(before) + lines)
            before = bytearray()
        before += rest
        if b"\r" in rest and is_text(bytes(before)):
            # Keep a final \r or cursor-up: the next bytes overwrite the line.
            end = next((end for end in (b"\r", _UP) if before.endswith(end)), b"")
            before = bytearray(b"\r" + last_state(bytes(before)) + end)
        if len(before) > LONGEST_LINE_BYTES:
            self._queue(source, bytes(before))
            before = bytearray()
        if before:
            self._partial[source] = before
            if instance == self._bar_instance:
                self._bar = source

    def flush(self) -> None:
        """Print the complete lines, and redraw the bar."""
        self._queue_bar_state()
        if any(self._ready.values()):
            self._erase()
            for stream, lines in self._ready.items():
                if lines:
                    _write(self._descriptors[stream], b"".join(lines))
                    self._ready[stream] = []
        self._draw()

    def close(self) -> None:
        """Print the last lines, which have no newline."""
        for source in sorted(self._partial):
            self._queue(source, bytes(self._partial[source]))
        self._partial.clear()
        self.flush()
        self._erase()

    def _queue(self, source: Source, lines: bytes) -> None:
        if b"\r" in lines:
            lines = b"\n".join(map(_plain, lines.split(b"\n")))
        prefix = tag(source)
        self._ready[source[1]] += [prefix, lines.replace(b"\n", b"\n" + prefix), b"\n"]
        if source == self._bar:
            self._printed_s = time.monotonic()

    def _queue_bar_state(self) -> None:
        """Without a terminal, print a state of the bar now and then to show the progress of a long run."""
        state = self._partial.get(self._bar) if self._bar else None
        if self._bar is None or state is None or not state.startswith(b"\r") or self._is_terminal[self._bar[1]]:
            return
        now = time.monotonic()
        if self._printed_s and now - self._printed_s > _BAR_STATE_S:
            self._queue(self._bar, bytes(state))
        self._printed_s = self._printed_s or now

    def _draw(self) -> None:
        state = bytes(self._partial.get(self._bar, b"")) if self._bar else b""
        if self._bar is None or not state or not self._is_terminal[self._bar[1]] or not is_text(state):
            self._erase()
            return
        line = _fit(tag(self._bar) + last_state(state))
        now = time.monotonic()
        if line != self._drawn and (not self._drawn or now - self._drawn_s >= _REDRAW_S):
            _write(self._descriptors[self._bar[1]], _ERASE + line)
            self._drawn, self._drawn_s = line, now

    def _erase(self) -> None:
        if self._drawn and self._bar is not None:
            _write(self._descriptors[self._bar[1]], _ERASE)
        self._drawn = b""


def is_text(data: bytes) -> bool:
    """Return whether bytes are UTF-8 text (possibly truncated) without control characters."""
    if _CONTROL.search(data):
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return True


def last_state(line: bytes) -> bytes:
    """Return the visible text of a line that was redrawn with carriage returns: its last state that is not empty."""
    for state in reversed(line.replace(_UP, b"").split(b"\r")):
        if state.strip():
            return state
    return b""


def _without_cursor_moves(before: bytes, data: bytes) -> bytes:
    """Replace cursor-up and newline by a carriage return in `data`, which follows bytes that end with `before`."""
    if before == _UP and data.startswith(b"\n"):
        data = b"\r" + data.lstrip(b"\n")
    return _UP_AND_DOWN.sub(b"\r", data) if _UP in data and is_text(data) else data


def _plain(line: bytes) -> bytes:
    end = b"\r" if line.endswith(b"\r") else b""  # a line that ends in \r\n was not redrawn
    body = line[: len(line) - len(end)]
    return last_state(body).rstrip(b" ") + end if b"\r" in body and is_text(body) else line


def _fit(line: bytes) -> bytes:
    """Truncate to the width of the terminal: a line that wraps cannot be drawn in place."""
    text = line.decode("utf-8", "ignore")
    return line if "\x1b" in text else text[: shutil.get_terminal_size().columns - 1].encode()


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
