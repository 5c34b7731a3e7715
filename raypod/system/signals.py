"""Signals that request this process to stop, and its end while a library blocks the main thread."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import stat
import sys
import threading
import time
from types import FrameType
from typing import Any, Callable, Collection, Iterator, List, NoReturn, Optional, Type, Union

from raypod.errors import Preempted, RaypodError
from raypod.system.command_line import tell

_RAY_ABORTS_AFTER_S = 3  # `alarm_on_failure_secs` of Abseil, which Ray does not change
_COPY_S = 0.25  # copies arrive within milliseconds; a user needs longer to press Ctrl-C again
# (share, at most so many seconds) of the time that are left when the main thread is interrupted, so that the run ends
# in order, and when the process ends at once, so that the deadline is not missed.
_SHARES = ((0.4, 5.0), (0.2, 1.0))


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


@contextlib.contextmanager
def unreported_if_ignored(kind: Type[BaseException]) -> Iterator[None]:
    """Within this context, Python prints no traceback of a `kind` that it ignores, as in a finalizer.

    A signal handler can raise there at any time. The caller keeps its exception, and raises it again later.
    """
    before = sys.unraisablehook

    def report(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, kind):
            before(unraisable)

    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = before


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


# Ends this process a limited time after a signal, also while its main thread is blocked in a library.
#
# Python runs signal handlers in the main thread only, after the function of a C library that it executes has
# returned. A thread therefore reads the numbers of the signals, which the interpreter writes into a pipe at once
# (`signal.set_wakeup_fd`).


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


Ending = Union[RaypodError, Preempted]
_cleanups: List[Callable[[Ending], None]] = []


@contextlib.contextmanager
def on_abort(cleanup: Callable[[Ending], None]) -> Iterator[None]:
    """Within this context, `abort` calls `cleanup` with its error. It runs in another thread than the main one."""
    _cleanups.append(cleanup)
    try:
        yield
    finally:
        _cleanups.remove(cleanup)


def abort(error: Ending) -> NoReturn:
    """Run the cleanups, the last registered one first, print the error as one line, and exit with its exit code."""
    try:
        for cleanup in reversed(_cleanups):
            cleanup(error)
    finally:
        try:
            end_of_bar = "\n" if sys.stderr.isatty() else ""  # a progress bar leaves the cursor in its line
            what = "" if isinstance(error, Preempted) else "error: "
            tell(f"{end_of_bar}raypod: {what}{error}", sys.stderr)
        finally:
            os._exit(error.exit_code)
