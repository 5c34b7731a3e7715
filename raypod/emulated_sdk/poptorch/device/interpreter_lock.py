"""Hold the interpreter lock, as the SDK does while a device executes a call or loads a program.

PopTorch releases the lock only while it compiles (source: the bindings of `poptorch_core`). Other threads of the
process do not run meanwhile. The emulation works with torch, which releases the lock; these variables hold it:

    EMULATED_POD_CALL_S    seconds for which each call holds the lock, after the call's own time
    EMULATED_POD_LOAD_S    the same when a model attaches to the device
"""

from __future__ import annotations

import ctypes
import os
import time

from _pod.activation import CALL_S as CALL
from _pod.activation import LOAD_S as LOAD

from poptorch.errors import Error

__all__ = ["CALL", "LOAD", "hold", "hold_for"]

_MICROSECONDS = 1_000_000
_C = ctypes.PyDLL(None)  # its functions run without releasing the lock


def hold(variable: str) -> None:
    """Hold the interpreter lock for the seconds of an environment variable.

    Raises:
        Error: it is set, and no number of seconds.
    """
    text = os.environ.get(variable)
    if not text:
        return
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise Error(f"{variable}={text}: must be a number of seconds")
    hold_for(seconds)


def hold_for(seconds: float) -> None:
    """Hold the interpreter lock for a time."""
    until = time.monotonic() + seconds
    while True:  # a signal ends a sleep
        left = until - time.monotonic()
        if left <= 0:
            return
        if left >= 1:
            _C.sleep(int(left))
        else:
            _C.usleep(int(left * _MICROSECONDS) + 1)
