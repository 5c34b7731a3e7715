"""Polling with a timeout, and processes that end with a test."""

from __future__ import annotations

import contextlib
import subprocess
import time
from typing import Any, Callable, Iterator, List

# Both are only reached by a failure; a machine that runs several Ray clusters at once can be ten times slower.
GONE_WITHIN_S = 60.0
COMMAND_S = 180.0


def wait_until(condition: Callable[[], bool], within_s: float = GONE_WITHIN_S) -> bool:
    """Poll until a condition holds; False after the timeout."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextlib.contextmanager
def ended_processes() -> Iterator[List[subprocess.Popen[Any]]]:
    """Yield a list; kill the processes in it at the end, and read the rest of their output."""
    started: List[subprocess.Popen[Any]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate(timeout=GONE_WITHIN_S)
