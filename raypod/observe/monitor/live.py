"""The live monitor: draws the pod once per interval and after every key, in a terminal that it restores at the end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from types import FrameType
from typing import Any, Iterator, List, Optional, Tuple, Union

from rich.console import Console
from rich.control import Control
from rich.text import Text

from raypod.observe.monitor.log_lines import LogTail, RemoteLog
from raypod.observe.monitor.model import LOG, Pod, Screen
from raypod.observe.monitor.pod_source import PodSource
from raypod.observe.monitor.views import render
from raypod.system.command_line import INTERRUPTED

_FIRST_S = 0.3  # so soon after the start the first answers are drawn


class FollowedLog:
    """The log that the screen shows, if it does."""

    def __init__(self, source: PodSource) -> None:
        self._source = source
        self._key: Optional[Tuple[str, str]] = None  # (host of the run, path)
        self._tail: Optional[Union[LogTail, RemoteLog]] = None

    def lines(self, pod: Pod, screen: Screen) -> List[str]:
        """Return the newest lines of the log of the selected instance; [] in other views, which end following it."""
        run = screen.run(pod)
        shown = run.instances[screen.instance :][:1] if screen.view == LOG and run is not None else ()
        path = shown[0].log_file if shown else None
        key = (run.host, path) if run is not None and path else None
        if key != self._key:
            self.close()
            self._key = key
            self._tail = self._source.log(run, path) if run is not None and path else None
        return self._tail.lines() if self._tail is not None else []

    def close(self) -> None:
        """Stop to follow."""
        if self._tail is not None:
            self._tail.close()
        self._key, self._tail = None, None


def show(source: PodSource, screen: Screen, interval_s: float, console: Console, ascii_only: bool) -> int:
    """Show the pod until the user quits or the terminal is closed. Return the exit code: 0, or 130 after Ctrl-C."""
    terminal = Terminal(console, sys.stdin.fileno())
    log = FollowedLog(source)
    with source, contextlib.closing(log), terminal.opened():
        pod, began_s, interval_now_s = source.poll(), time.monotonic(), _FIRST_S
        try:
            while not terminal.is_closed:
                _draw(console, pod, screen, log, ascii_only)
                keys = terminal.keys(began_s + interval_now_s - time.monotonic())
                for key in keys or ():
                    if key in ("q", "Q"):
                        return 0
                    screen = screen.pressed(key, pod)
                if time.monotonic() - began_s >= interval_now_s:
                    pod, began_s = source.poll(), time.monotonic()
                    interval_now_s = min(interval_s, 2 * interval_now_s)
        except KeyboardInterrupt:
            return INTERRUPTED
    return 0


def _draw(console: Console, pod: Pod, screen: Screen, log: FollowedLog, ascii_only: bool) -> None:
    size: Tuple[int, int] = (console.size.width, console.size.height)
    lines = render(pod, screen, log.lines(pod, screen), size, ascii_only)
    for line in lines:
        line.pad_right(max(0, size[0] - line.cell_len))  # overwrite what was there
    console.control(Control.home())
    console.print(Text("\n").join(lines), end="", no_wrap=True, overflow="crop", crop=True)


_SEQUENCES = {
    "[A": "up",
    "[B": "down",
    "[C": "right",
    "[D": "left",
    "[5~": "page up",
    "[6~": "page down",
    "OA": "up",
    "OB": "down",
    "OC": "right",
    "OD": "left",
}
_NAMES = {"\t": "tab", "\r": "enter", "\n": "enter", "\x1b": "escape"}
_WOKEN = (signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP, signal.SIGCONT, signal.SIGTSTP)


class Terminal:
    """Reads keys from a terminal. SIGTERM, SIGHUP and a closed terminal set `is_closed`."""

    def __init__(self, console: Console, descriptor: int) -> None:
        self._console, self._descriptor = console, descriptor
        self.is_closed = False
        self._wake_read, self._wake_write = -1, -1
        self._before: List[Any] = []  # the modes of the terminal
        self._is_to_stop = self._was_stopped = False

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Use the terminal's alternate screen within the context, without echo and without line buffering."""
        self._before = termios.tcgetattr(self._descriptor)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_pipe)
            for number in _WOKEN:
                stack.callback(signal.signal, number, signal.signal(number, self._handle))
            stack.callback(termios.tcsetattr, self._descriptor, termios.TCSADRAIN, self._before)
            tty.setcbreak(self._descriptor, termios.TCSADRAIN)
            stack.enter_context(self._console.screen(hide_cursor=True))
            yield

    def keys(self, timeout_s: float) -> Optional[List[str]]:
        """Wait for keys; return them, [] after the timeout, None if a signal asks for a new display or the end."""
        readable, _, _ = select.select([self._descriptor, self._wake_read], [], [], max(0.0, timeout_s))
        if self._wake_read in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            self._stop_or_resume()
            return None
        if not readable:
            return []
        try:
            data = os.read(self._descriptor, 4096)
        except OSError:  # the terminal is gone
            data = b""
        if not data:
            self.is_closed = True
        return parse_keys(data.decode(errors="ignore"))

    def _handle(self, number: int, frame: Optional[FrameType]) -> None:
        if number in (signal.SIGTERM, signal.SIGHUP):
            self.is_closed = True
        self._is_to_stop = self._is_to_stop or number == signal.SIGTSTP
        self._was_stopped = self._was_stopped or number == signal.SIGCONT
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")

    def _stop_or_resume(self) -> None:
        """After Ctrl-Z, give the terminal back until the shell continues this process."""
        if self._is_to_stop:
            self._is_to_stop = False
            self._console.set_alt_screen(False)
            self._console.show_cursor(True)
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)
            handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)  # this process stops here
            signal.signal(signal.SIGTSTP, handler)
            self._was_stopped = True
        if self._was_stopped:
            self._was_stopped = False
            tty.setcbreak(self._descriptor, termios.TCSADRAIN)
            self._console.set_alt_screen(True)
            self._console.show_cursor(False)

    def _close_pipe(self) -> None:
        os.close(self._wake_read)
        os.close(self._wake_write)


def parse_keys(text: str) -> List[str]:
    """Return the keys in what a terminal sent: characters, and the names of special keys."""
    found, at = [], 0
    while at < len(text):
        if text[at] == "\x1b":
            name = next((each for each in _SEQUENCES if text.startswith(each, at + 1)), None)
            if name is not None:
                found.append(_SEQUENCES[name])
                at += 1 + len(name)
                continue
            if text[at + 1 : at + 2] in ("[", "O"):  # another special key: skip the sequence
                at += 2
                while at < len(text) and not 0x40 <= ord(text[at]) <= 0x7E:
                    at += 1
                at += 1
                continue
        found.append(_NAMES.get(text[at], text[at]))
        at += 1
    return found


def is_live() -> bool:
    """Return whether input and output are a terminal that can show a screen."""
    if os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return False
    try:
        return sys.stdin.isatty() and sys.stdout.isatty()
    except (ValueError, AttributeError):  # closed
        return False
