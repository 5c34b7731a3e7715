"""The live monitor: draws the pod once per interval and after every key, until the user quits."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import List, Optional, Tuple, Union

from rich.console import Console
from rich.control import Control
from rich.text import Text

from raypod.observe.monitor.log_lines import LogTail
from raypod.observe.monitor.model import Pod
from raypod.observe.monitor.pod_source import PodSource
from raypod.observe.monitor.remote_log import RemoteLog
from raypod.observe.monitor.render import render
from raypod.observe.monitor.screen import LOG, Screen
from raypod.observe.monitor.terminal import Terminal
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
