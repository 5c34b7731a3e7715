"""Polling with a timeout, for tests."""

from __future__ import annotations

import time
from typing import Callable

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
