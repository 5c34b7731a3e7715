"""Polling with a timeout, for tests."""

from __future__ import annotations

import time
from typing import Callable

GONE_WITHIN_S = 15.0


def wait_until(condition: Callable[[], bool], within_s: float = GONE_WITHIN_S) -> bool:
    """Poll until a condition holds; False after the timeout."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
