"""The throughput over the most recent calls.

The reports of several instances arrive in any order, so that the reports of two calls may complete within a millisecond
of each other. The time between them says nothing about the speed; the time of all calls of a second does.
"""

from __future__ import annotations

import collections
from typing import Deque, Tuple

WINDOW_S = 1.0


class RecentThroughput:
    """Samples per second over the newest calls that together took at least `WINDOW_S` seconds."""

    def __init__(self) -> None:
        self._calls: Deque[Tuple[int, float]] = collections.deque()  # (samples, seconds), oldest first
        self._samples, self._seconds = 0, 0.0

    def add(self, samples: int, elapsed_s: float) -> None:
        """Add a call that completed `elapsed_s` after the one before it."""
        self._calls.append((samples, elapsed_s))
        self._samples, self._seconds = self._samples + samples, self._seconds + elapsed_s
        while self._seconds - self._calls[0][1] >= WINDOW_S:
            oldest_samples, oldest_s = self._calls.popleft()
            self._samples, self._seconds = self._samples - oldest_samples, self._seconds - oldest_s

    def clear(self) -> None:
        """Forget all calls."""
        self._calls.clear()
        self._samples, self._seconds = 0, 0.0

    @property
    def per_s(self) -> float:
        """Samples per second; 0 without a call."""
        return self._samples / self._seconds if self._seconds > 0 else 0.0
