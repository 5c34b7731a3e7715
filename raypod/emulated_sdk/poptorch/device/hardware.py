"""Queries for the hardware and for where the caller runs.

The emulation has no IPUs. EMULATED_POD_IPUS=n makes it report n of them, for programs that check before they start.
"""

from __future__ import annotations

import os

from poptorch.device_mode import is_on_device
from poptorch.errors import Error

_IPUS = "EMULATED_POD_IPUS"
_MK2 = 2


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Return whether a device of `num_ipus` IPUs, a power of two, is available; False without EMULATED_POD_IPUS.

    Raises:
        Error: EMULATED_POD_IPUS is not a number.
    """
    return 0 < num_ipus <= _reported_ipus() and num_ipus & (num_ipus - 1) == 0


def ipuHardwareVersion() -> int:
    """Return the architecture of the IPUs: 2 (Mk2) if EMULATED_POD_IPUS reports some, else 0."""
    return _MK2 if _reported_ipus() else 0


def isRunningOnIpu() -> bool:
    """Return whether the caller runs inside the forward of a wrapped model."""
    return is_on_device()


def _reported_ipus() -> int:
    text = os.environ.get(_IPUS, "0")
    if not (text.isascii() and text.isdigit()):
        raise Error(f"{_IPUS}={text!r} is not a number of IPUs; unset it, or set it to an integer of at least 0")
    return int(text)
