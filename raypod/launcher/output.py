"""Where the output of instances goes: byte for byte into a log file each, and onto the console."""

from __future__ import annotations

import codecs
import os
import re
import shutil
import time
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from raypod.errors import ConfigError, RunError
from raypod.launcher.records import STDERR, STDOUT

_STDERR = 2
_TAIL_BYTES = 4096
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Failed|Interrupt|Warning)(: .*)?")


class Output:
    """The log files of a run folder, and the console; `only` names the one instance that the console shows."""

    def __init__(self, folder: str, instances: int, console: Console, only: Optional[int] = None) -> None:
        self._folder, self._console, self._only = folder, console, only
        self._logs: Dict[int, int] = {}
        self._tails: Dict[int, bytes] = {}  # of stderr
        try:
            Path(folder, "logs").mkdir(parents=True, exist_ok=True)
            for instance in range(instances):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                self._logs[instance] = os.open(self.log_file(instance), flags, 0o644)
        except OSError as error:
            raise ConfigError(
                f"cannot write to the run folder {folder}: {error.strerror}; choose a --run-dir"
            ) from None

    def log_file(self, instance: int) -> str:
        """Path of an instance's log."""
        return f"{self._folder}/logs/instance-{instance}.log"

    def add(self, instance: int, stream: int, data: bytes) -> None:
        """Take bytes of a program. RunError if its log cannot be written."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._logs[instance], view) :]
        except OSError as error:
            raise RunError(f"cannot write {self.log_file(instance)}: {error.strerror}") from None
        if stream == _STDERR:
            self._tails[instance] = (self._tails.get(instance, b"") + data)[-_TAIL_BYTES:]
        if self._only in (None, instance):
            self._console.add(instance, stream, data)

    def last_exception(self, instance: int) -> Optional[str]:
        """The exception in the last line of an instance's stderr, if that is what it looks like."""
        lines = self._tails.get(instance, b"").decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return last if _EXCEPTION.fullmatch(last) else None

    def flush(self) -> None:
        """Show what is whole."""
        self._console.flush()

    def close(self) -> None:
        """Show the rest, and close the log files. Harmless when called again."""
        try:
            self._console.close()
        finally:
            for descriptor in self._logs.values():
                os.close(descriptor)
            self._logs = {}


# --- from launcher.console: The output of all instances on one console: whole lines, tagged as mpirun does it, and one progress bar.
#
# Bytes pass through unchanged; a tag `[1,<instance>]<stdout>:` stands before each line. Lines of different instances and
# streams never mix. A line that a program redraws with carriage returns is drawn in place on a terminal for one instance,
# and becomes plain elsewhere: the state in which it was left, and for that one instance a state now and then. So is a bar
# below another one, for which a program moves the cursor down and up again.
#

LONGEST_LINE_BYTES = 8 << 20  # a longer one goes on as another line, so that memory stays bounded
_LIFE_SIGN_S = 10.0
_REDRAW_S = 0.05
_CONTROL = re.compile(rb"[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]")
_ERASE = b"\r\x1b[K"
_UP = b"\x1b[A"
_UP_AND_DOWN = re.compile(rb"(?:\x1b\[A)+\n+")
_NAMES = {STDOUT: b"stdout", STDERR: b"stderr"}

Source = Tuple[int, int]  # instance, STDOUT or STDERR


def tag(source: Source) -> bytes:
    """What stands before each line of an instance's stream."""
    return b"[1,%d]<%s>:" % (source[0], _NAMES[source[1]])


class Console:
    """Writes to two descriptors, stdout and stderr. `bar_instance` may keep a line to draw in place."""

    def __init__(self, out: int = 1, err: int = 2, bar_instance: int = 0) -> None:
        self._descriptors = {STDOUT: out, STDERR: err}
        self._is_terminal = {stream: os.isatty(number) for stream, number in self._descriptors.items()}
        self._bar_instance = bar_instance
        self._partial: Dict[Source, bytearray] = {}
        self._ready: Dict[int, List[bytes]] = {STDOUT: [], STDERR: []}
        self._bar: Optional[Source] = None  # whose partial line is drawn in place
        self._drawn = b""
        self._drawn_s = self._said_s = 0.0

    def add(self, instance: int, stream: int, data: bytes) -> None:
        """Take bytes of a program; `flush` shows what is whole."""
        source = (instance, stream)
        before = self._partial.pop(source, bytearray())
        data = _without_going_down(bytes(before[-len(_UP) :]), data)
        lines, newline, rest = data.rpartition(b"\n")
        if newline:
            self._say(source, bytes(before) + lines)
            before = bytearray()
        before += rest
        if b"\r" in rest and is_text(bytes(before)):
            # After these, what comes next starts at the beginning again.
            end = next((end for end in (b"\r", _UP) if before.endswith(end)), b"")
            before = bytearray(b"\r" + last_state(bytes(before)) + end)
        if len(before) > LONGEST_LINE_BYTES:
            self._say(source, bytes(before))
            before = bytearray()
        if before:
            self._partial[source] = before
            if instance == self._bar_instance:
                self._bar = source

    def flush(self) -> None:
        """Show everything whole, and the line that is drawn in place."""
        self._show_life()
        if any(self._ready.values()):
            self._erase()
            for stream, lines in self._ready.items():
                if lines:
                    _write(self._descriptors[stream], b"".join(lines))
                    self._ready[stream] = []
        self._draw()

    def close(self) -> None:
        """Show the last lines that have no end of their own."""
        for source in sorted(self._partial):
            self._say(source, bytes(self._partial[source]))
        self._partial.clear()
        self.flush()
        self._erase()

    def _say(self, source: Source, lines: bytes) -> None:
        if b"\r" in lines:
            lines = b"\n".join(map(_plain, lines.split(b"\n")))
        begin = tag(source)
        self._ready[source[1]] += [begin, lines.replace(b"\n", b"\n" + begin), b"\n"]
        if source == self._bar:
            self._said_s = time.monotonic()

    def _show_life(self) -> None:
        """Without a terminal: a redrawn line's state now and then, so that a long run is seen to go on."""
        state = self._partial.get(self._bar) if self._bar else None
        if self._bar is None or state is None or not state.startswith(b"\r") or self._is_terminal[self._bar[1]]:
            return
        now = time.monotonic()
        if self._said_s and now - self._said_s > _LIFE_SIGN_S:
            self._say(self._bar, bytes(state))
        self._said_s = self._said_s or now

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
    """Whether bytes look like a line for people: UTF-8 (perhaps cut at its end) without control characters."""
    if _CONTROL.search(data):
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return True


def last_state(line: bytes) -> bytes:
    """What a line shows that was redrawn from its beginning: its last state that is not empty."""
    for state in reversed(line.replace(_UP, b"").split(b"\r")):
        if state.strip():
            return state
    return b""


def _without_going_down(before: bytes, data: bytes) -> bytes:
    """Data after what ends with `before`: going up from a bar and down to it again is going to its beginning."""
    if before == _UP and data.startswith(b"\n"):
        data = b"\r" + data.lstrip(b"\n")
    return _UP_AND_DOWN.sub(b"\r", data) if _UP in data and is_text(data) else data


def _plain(line: bytes) -> bytes:
    end = b"\r" if line.endswith(b"\r") else b""  # the line ends of another system are no redrawing
    body = line[: len(line) - len(end)]
    return last_state(body).rstrip(b" ") + end if b"\r" in body and is_text(body) else line


def _fit(line: bytes) -> bytes:
    """Cut to the width of the terminal: a line that wraps cannot be drawn in place."""
    text = line.decode("utf-8", "ignore")
    return line if "\x1b" in text else text[: shutil.get_terminal_size().columns - 1].encode()


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
