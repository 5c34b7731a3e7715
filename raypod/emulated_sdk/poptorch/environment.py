"""The SDK version, the logger, and the hardware that the emulated SDK reports.

POPTORCH_LOG_LEVEL sets the log level. The emulation has no IPUs; EMULATED_POD_IPUS=n makes it report n of them, for
programs that check before they start.
"""

from __future__ import annotations

import logging
import os
from typing import Dict, Optional, Tuple, Union

from _pod.activation import IPUS as _IPUS

from poptorch.errors import Error

VERSION = "3.4.0"  # of the SDK whose API this is

logger = logging.getLogger("poptorch::python")

_MK2 = 2

# The SDK's numbers, and the severities of Python's `logging`.
_LEVELS: Dict[str, Tuple[int, int]] = {
    "TRACE": (0, 5),
    "DEBUG": (1, logging.DEBUG),
    "INFO": (2, logging.INFO),
    "WARN": (3, logging.WARNING),
    "ERR": (4, logging.ERROR),
    "OFF": (6, logging.CRITICAL + 10),
}


def setLogLevel(level: Union[str, int]) -> None:
    """Set the minimum severity of log messages.

    Args:
        level: "TRACE", "DEBUG", "INFO", "WARN", "ERR" or "OFF", or their numbers 0 to 4 and 6.

    Raises:
        ValueError: any other level.
    """
    severity = _severity(level)
    if severity is None and isinstance(level, int):
        raise ValueError(f"Invalid log level integer: {level}")
    if severity is None:
        *names, last = sorted(_LEVELS)
        raise ValueError(f"Unknown log level: {level}. Valid values are {', '.join(names)} and {last}")
    logger.setLevel(severity)


def set_level_from_environment() -> None:
    """Set the level to POPTORCH_LOG_LEVEL, a name or a number; WARN if it is unset or unknown."""
    text = os.environ.get("POPTORCH_LOG_LEVEL", "WARN")
    severity = _severity(int(text) if text.isascii() and text.isdigit() else text.upper())
    logger.setLevel(logging.WARNING if severity is None else severity)
    if severity is None:
        logger.warning("Unknown POPTORCH_LOG_LEVEL=%r: using WARN. Valid levels: %s", text, ", ".join(_LEVELS))


def _severity(level: Union[str, int]) -> Optional[int]:
    """Return the level of Python's `logging`; None for an unknown level."""
    numbers: Dict[Union[str, int], int] = dict(_LEVELS.values())
    names: Dict[Union[str, int], int] = {name: severity for name, (_, severity) in _LEVELS.items()}
    is_number = isinstance(level, int) and not isinstance(level, bool)
    return numbers.get(level) if is_number else names.get(level) if isinstance(level, str) else None


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Return whether a device of `num_ipus` IPUs, a power of two, is available; False without EMULATED_POD_IPUS.

    Raises:
        Error: EMULATED_POD_IPUS is not a number.
    """
    return 0 < num_ipus <= _reported_ipus() and num_ipus & (num_ipus - 1) == 0


def ipuHardwareVersion() -> int:
    """Return the architecture of the IPUs: 2 (Mk2). AssertionError unless EMULATED_POD_IPUS reports some."""
    assert _reported_ipus(), "No IPU hardware available on this system"
    return _MK2


def _reported_ipus() -> int:
    text = os.environ.get(_IPUS, "0")
    if not (text.isascii() and text.isdigit()):
        raise Error(f"{_IPUS}={text!r} is not a number of IPUs; unset it, or set it to an integer of at least 0")
    return int(text)
