"""Measures how long this process has waited for the other processes of its pod, over all threads."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Iterator

_lock = threading.Lock()
_total_s = 0.0


@contextlib.contextmanager
def measured() -> Iterator[None]:
    """Add the duration of the block, however it ends."""
    global _total_s
    began_s = time.monotonic()
    try:
        yield
    finally:
        with _lock:
            _total_s += time.monotonic() - began_s


def total_s() -> float:
    """Return the seconds since this process was started; waits of concurrent threads add up."""
    return _total_s
