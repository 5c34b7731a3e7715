"""Which hardware there is, and where code runs (contract 2.6)."""

from __future__ import annotations

from .mode import is_on_device


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Whether this many IPUs are there: never, as every device here is emulated."""
    return False


def ipuHardwareVersion() -> int:
    """Architecture of the IPUs; 0 for none."""
    return 0


def isRunningOnIpu() -> bool:
    """Whether the caller runs inside the forward of a wrapped model."""
    return is_on_device()
