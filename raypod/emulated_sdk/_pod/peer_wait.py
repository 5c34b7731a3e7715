"""Measures how long this process has waited for the other processes of its pod, over all threads."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Iterator

from _pod import spans

_lock = threading.Lock()
_total_s = 0.0


@contextlib.contextmanager
def measured(doing: str) -> Iterator[None]:
    """Add the duration of the block, however it ends; `doing` names it in a profile."""
    global _total_s
    began_s = time.monotonic()
    try:
        with spans.measured(doing, "wait for peers"):
            yield
    finally:
        with _lock:
            _total_s += time.monotonic() - began_s


def total_s() -> float:
    """Return the seconds since this process was started; waits of concurrent threads add up."""
    return _total_s
