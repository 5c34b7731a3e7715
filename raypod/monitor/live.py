"""The live monitor: draws the pod once per interval and after every key, until the user quits."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import List, Optional, Tuple

from rich.console import Console
from rich.control import Control
from rich.text import Text

from raypod.cli import INTERRUPTED
from raypod.monitor.log_lines import LogTail
from raypod.monitor.model import Pod
from raypod.monitor.pod_source import PodSource
from raypod.monitor.render import render
from raypod.monitor.screen import LOG, Screen
from raypod.monitor.terminal import Terminal

_FIRST_S = 0.3  # so soon after the start the first answers are drawn


class FollowedLog:
    """The log that the screen shows, if it does."""

    def __init__(self) -> None:
        self._path: Optional[str] = None
        self._tail: Optional[LogTail] = None

    def lines(self, pod: Pod, screen: Screen) -> List[str]:
        """Return the newest lines of the log of the selected instance; [] in other views."""
        run = screen.run(pod)
        if screen.view != LOG or run is None or screen.instance >= len(run.instances):
            return []
        path = run.instances[screen.instance].log_file
        if path != self._path or self._tail is None:
            self._path, self._tail = path, LogTail(Path(path)) if path else None
        return self._tail.lines() if self._tail is not None else []


def show(source: PodSource, screen: Screen, interval_s: float, console: Console, ascii_only: bool) -> int:
    """Show the pod until the user quits or the terminal is closed. Return the exit code: 0, or 130 after Ctrl-C."""
    terminal = Terminal(console, sys.stdin.fileno())
    log = FollowedLog()
    with source, terminal.opened():
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
