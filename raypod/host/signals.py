"""Signals that request this process to stop."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import stat
import threading
import time
from types import FrameType
from typing import Iterator, List, Optional

_RAY_ABORTS_AFTER_S = 3  # `alarm_on_failure_secs` of Abseil, which Ray does not change
_COPY_S = 0.25  # copies arrive within milliseconds; a user needs longer to press Ctrl-C again


def stop_signals() -> List[signal.Signals]:
    """Return SIGINT, SIGTERM and SIGHUP; without SIGHUP if it is ignored, as under nohup."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    return numbers if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*numbers, signal.SIGHUP]


def preemption_signals() -> List[signal.Signals]:
    """Return the signals by which Slurm and Kubernetes announce a preemption: SIGUSR1 (`--signal`) and SIGTERM."""
    return [signal.SIGUSR1, signal.SIGTERM]


@contextlib.contextmanager
def postponed_signals() -> Iterator[None]:
    """Within this context, signals that request a stop have no effect; the first of them is delivered at its end."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield
        return
    received: List[int] = []

    def on_signal(number: int, frame: Optional[FrameType]) -> None:
        received.append(number)

    before = {number: signal.signal(number, on_signal) for number in {*stop_signals(), *preemption_signals()}}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


def leave_terminal() -> None:
    """Redirect the standard streams that are terminals to /dev/null: writing to a closed terminal is an error."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        with contextlib.suppress(OSError):  # it is closed
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):  # isatty returns False for a closed terminal
                os.dup2(null, descriptor)
    os.close(null)


def cancel_abort() -> None:
    """Cancel the alarm by which Ray aborts a process that has not ended 3 seconds after SIGTERM.

    During `ray.init()` a C++ handler lies before the one of Python, which sets that alarm although the signal is
    handled. A handler of a run that still ends its instances calls this first.
    """
    remaining_s = signal.alarm(0)
    if remaining_s > _RAY_ABORTS_AFTER_S:  # another alarm
        signal.alarm(remaining_s)


class SignalFilter:
    """Distinguishes a second request to stop from a copy of the first.

    `timeout` sends its signal to a process and to its group; Ctrl-C reaches the group, and wrappers forward it.
    """

    def __init__(self) -> None:
        self._accepted_s = -math.inf

    def is_copy(self) -> bool:
        """Return whether the current signal is a copy of the last one for which this method returned False."""
        now_s = time.monotonic()
        if now_s - self._accepted_s < _COPY_S:
            return True
        self._accepted_s = now_s
        return False
