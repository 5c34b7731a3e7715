"""Requests to stop a run: by a signal, by the caller, or because Ray drains a host."""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType
from typing import Iterator, Optional

from raypod.host.signals import SignalFilter, cancel_abort, leave_terminal, stop_signals


class Stop:
    """Whether a stop of the run was requested, and why. `cause` is empty for a signal."""

    def __init__(self) -> None:
        self.requested = False
        self.cause = ""
        self._is_deferred = self._interrupted = False
        self.is_signalled = False  # a signal requested the stop
        self._filter = SignalFilter()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Within this context a signal takes effect after the calls in progress are done and saved."""
        self.check()
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has: Python ignores exceptions in finalizers and other callbacks."""
        if self._interrupted:
            raise KeyboardInterrupt

    def request(self, cause: str) -> None:
        """Stop without a signal; `cause` is the reason."""
        self.requested = True
        self.cause = "" if self.is_signalled else self.cause or cause

    def on_signal(self, number: int, frame: Optional[FrameType]) -> None:
        """Handle a signal that requests a stop."""
        cancel_abort()
        if number == signal.SIGHUP:
            leave_terminal()
        if self._filter.is_copy():
            return
        if self.is_signalled or not self._is_deferred:
            self._interrupted = True
            raise KeyboardInterrupt
        self.requested = self.is_signalled = True


@contextlib.contextmanager
def stop_on_signal(stop: Stop) -> Iterator[None]:
    """End the run on a stop signal: during training after a checkpoint; otherwise, or if repeated, at once.

    Only the main thread can set signal handlers; in another one the context has no effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop.on_signal) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
