"""Which hardware there is, and where code runs (contract 2.6).

There is none. For programs that check before they begin, EMULATED_POD_IPUS=n makes the emulation claim a pod of n IPUs.
"""

from __future__ import annotations

import os

from poptorch._device.mode import is_on_device
from poptorch._errors import Error

_IPUS = "EMULATED_POD_IPUS"
_MK2 = 2


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Whether there is a device of this many IPUs; devices come in powers of two.

    False without EMULATED_POD_IPUS. Error when that is no number.
    """
    return 0 < num_ipus <= _claimed_ipus() and num_ipus & (num_ipus - 1) == 0


def ipuHardwareVersion() -> int:
    """Architecture of the IPUs: 2, for Mk2, where EMULATED_POD_IPUS claims some, else 0 for none."""
    return _MK2 if _claimed_ipus() else 0


def isRunningOnIpu() -> bool:
    """Whether the caller runs inside the forward of a wrapped model."""
    return is_on_device()


def _claimed_ipus() -> int:
    text = os.environ.get(_IPUS, "0")
    if not (text.isascii() and text.isdigit()):
        raise Error(f"{_IPUS}={text!r} is not a number of IPUs; unset it, or give a whole number of at least 0")
    return int(text)
