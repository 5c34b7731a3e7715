"""Ends this process a limited time after a signal, also while its main thread is blocked in a library.

Python runs signal handlers in the main thread only, after the function of a C library that it executes has returned. A
thread therefore reads the numbers of the signals, which the interpreter writes into a pipe at once
(`signal.set_wakeup_fd`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Callable, Collection

# (share, at most so many seconds) of the time that are left when the main thread is interrupted, so that the run ends
# in order, and when the process ends at once, so that the deadline is not missed.
_SHARES = ((0.4, 5.0), (0.2, 1.0))


def time_to_end(within_s: float) -> float:
    """Return the time that is left of `within_s` when the main thread is interrupted."""
    share, most_s = _SHARES[0]
    return min(share * within_s, most_s)


class SignalDeadline:
    """Interrupts the main thread, and then ends the process, before a time after the first signal has passed."""

    def __init__(
        self, numbers: Collection[int], within_s: float, interrupt: Callable[[], None], end: Callable[[], None]
    ) -> None:
        """Start the thread; called in the main thread.

        Args:
            numbers: the signals. Their handlers are those of the caller.
            within_s: the time from the first of them to the end of the process.
            interrupt: called in the thread when 40 % of the time, at most 5 s, are left.
            end: called in the thread when 20 % of the time, at most 1 s, are left; it ends the process.
        """
        self._numbers = frozenset(int(number) for number in numbers)
        after_s = [within_s - min(share * within_s, most_s) for share, most_s in _SHARES]
        self._steps = tuple(zip(after_s, (interrupt, end)))
        self._closed = threading.Event()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="signal deadline", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread: the process does not end any more. Called in the main thread."""
        self._closed.set()
        signal.set_wakeup_fd(self._before)
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)

    def _run(self) -> None:
        received = b""
        while not self._numbers & set(received):
            received = os.read(self._reader, 4096)
            if not received:  # closed
                return
            self._forward(received)
        began_s = time.monotonic()
        for after_s, step in self._steps:
            if self._closed.wait(max(0.0, began_s + after_s - time.monotonic())):
                return
            step()

    def _forward(self, received: bytes) -> None:
        """Pass the numbers on to the one who read them before, for example an event loop."""
        if self._before != -1:
            with contextlib.suppress(OSError):  # its buffer is full, or it is closed
                os.write(self._before, received)
