"""Repeat what failed, after a pause; wait for what takes time."""

from __future__ import annotations

import errno
import itertools
import random
import time
from typing import Callable, Optional, TypeVar

T = TypeVar("T")
_POLL_S = 0.05  # short, so that signals are handled
_QUIET_S = 2.0
_MOST_DOUBLINGS = 30  # of a pause; a larger power of two is no float
# Errors of a disk or a network that may return: another attempt can succeed.
_PASSING = frozenset(
    getattr(errno, name)
    for name in (
        *("EIO", "ESTALE", "ETIMEDOUT", "ENXIO", "ENODEV", "EREMOTEIO", "ENOLINK", "ENOTCONN", "ESHUTDOWN", "EPIPE"),
        *("ECONNRESET", "ECONNREFUSED", "ECONNABORTED", "ENETDOWN", "ENETUNREACH", "ENETRESET", "EHOSTDOWN"),
        "EHOSTUNREACH",
    )
)
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS))  # of a disk, until space is freed or it is remounted


def retried(
    action: Callable[[], T],
    pause_s: Callable[[int], float],
    repeats: Callable[[Exception], bool],
    attempts: Optional[int] = None,
    sleep: Optional[Callable[[float], None]] = None,
) -> T:
    """Return what an action returns; repeat it as long as it fails and may be repeated.

    Args:
        pause_s: returns the seconds until the next attempt from the number of those before.
        repeats: returns whether an exception is repeated. It is called for all but the last attempt.
        attempts: how many there are at most; without end by default.
        sleep: waits for a time, or less; `time.sleep` by default.

    Raises:
        Exception: that of the last attempt.
    """
    for attempt in itertools.count(1):
        try:
            return action()
        except Exception as error:
            if attempt == attempts or not repeats(error):
                raise
        (sleep or time.sleep)(pause_s(attempt))
    raise AssertionError("count ended")


def awaited(is_done: Callable[[], bool], limit_s: float, on_wait: Callable[[], None]) -> bool:
    """Return whether something is done within a time. `on_wait` is called once if that takes longer than 2 s."""
    began_s, is_quiet = time.monotonic(), True
    while not is_done():
        took_s = time.monotonic() - began_s
        if took_s >= limit_s:
            return False
        if is_quiet and took_s > _QUIET_S:
            is_quiet = False
            on_wait()
        time.sleep(_POLL_S)
    return True


def growing(first_s: float, most_s: float) -> Callable[[int], float]:
    """Return pauses of random lengths, of which the longest possible doubles from `first_s` up to `most_s`.

    They are random so that many processes do not all ask a server again at the same moment.
    """
    return lambda attempt: random.uniform(0, min(most_s, first_s * 2 ** min(attempt - 1, _MOST_DOUBLINGS)))


def is_passing(error: BaseException) -> bool:
    """Return whether an error is one of a disk or a network that may return."""
    return isinstance(error, (ConnectionError, TimeoutError)) or getattr(error, "errno", None) in _PASSING


def is_passing_write(error: BaseException) -> bool:
    """As `is_passing`, for an attempt to write: also of a disk that is full or read-only."""
    return is_passing(error) or getattr(error, "errno", None) in _FULL


def constant(seconds: float) -> Callable[[int], float]:
    """Return pauses of one length."""
    return lambda attempt: seconds
