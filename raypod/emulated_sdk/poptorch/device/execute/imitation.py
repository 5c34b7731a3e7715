"""What a call does on IPUs besides computing: it holds the interpreter lock, and loses the device with a peer.

PopTorch releases the interpreter lock only while it compiles (source: the bindings of `poptorch_core`). Other threads
of the process do not run meanwhile. The emulation works with torch, which releases the lock; these variables hold it:

    EMULATED_POD_CALL_S    seconds for which each call holds the lock, after the call's own time
    EMULATED_POD_LOAD_S    the same when a model attaches to the device

How a call ends that loses a peer, as on IPUs. EMULATED_POD_DEVICE_FAULT is one of:

    raise[:ACTION]       RecoverableError; the device can still be read, and used again
    unusable[:ACTION]    RecoverableError; from then on every use of a compiled model in this process is an Error
    unrecoverable        UnrecoverableError, and the same
    hang                 holds the interpreter lock for EMULATED_POD_TIMEOUT_S; then Error: the host sync timed out
    @FILE                what FILE contains as the peer is lost, for a fault in a program that runs; nothing without it

ACTION is the `recovery_action`, by default IPU_RESET. Without the variable the call raises PeerFailed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from pathlib import Path
from typing import Iterator, Tuple

from _pod.rendezvous import PeerFailed, timeout_s

from poptorch.errors import Error, RecoverableError, UnrecoverableError

VARIABLE = "EMULATED_POD_DEVICE_FAULT"
_ACTIONS = ("IPU_RESET", "LINK_RESET", "PARTITION_RESET", "FULL_RESET")
_APPLICATION = "poplar_application_runtime_error"


class _Device:
    is_usable = True  # of this process


@contextlib.contextmanager
def at_a_lost_peer() -> Iterator[None]:
    """Within this context the loss of a peer ends the call as the variable says; Error if its value is unknown."""
    _chosen()
    try:
        yield
    except PeerFailed as error:
        fault, action = _chosen()
        if not fault:
            raise
        _Device.is_usable = fault in ("raise", "hang")
        if fault == "hang":
            hold_for(timeout_s())
            raise Error(f"Host sync timed out: {error}", _APPLICATION) from error
        if fault == "unrecoverable":
            raise UnrecoverableError(str(error)) from error
        raise RecoverableError(str(error), recovery_action=action) from error


def check_usable() -> None:
    """Raise Error if a fault has made the device of this process unusable."""
    if not _Device.is_usable:
        raise Error("Application runtime error: the device is in an error state", _APPLICATION)


def _chosen() -> Tuple[str, str]:
    """Return the fault, "" for none, and its recovery action."""
    text = os.environ.get(VARIABLE, "")
    if text.startswith("@"):
        file = Path(text[1:])
        text = file.read_text().strip() if file.exists() else ""
    fault, colon, action = text.partition(":")
    has_action = fault in ("raise", "unusable")
    if not (fault in ("", "hang", "unrecoverable") and not colon or has_action and (not colon or action in _ACTIONS)):
        raise Error(
            f"{VARIABLE}={text}: must be raise, unusable, unrecoverable or hang; the first two may name a recovery "
            f"action, as in unusable:PARTITION_RESET ({', '.join(_ACTIONS)})"
        )
    return fault, action or "IPU_RESET"


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
