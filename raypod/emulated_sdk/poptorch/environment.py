"""The SDK version, the logger, and the hardware that the emulated SDK reports.

POPTORCH_LOG_LEVEL sets the log level. The emulation has no IPUs; EMULATED_POD_IPUS=n makes it report n of them, for
programs that check before they start.
"""

from __future__ import annotations

import logging
import os
from typing import Dict, Optional, Union

from poptorch.errors import Error

VERSION = "3.4.0"  # of the SDK whose API this is

logger = logging.getLogger("poptorch::python")

_IPUS = "EMULATED_POD_IPUS"
_MK2 = 2

# In the order of the SDK's numbers, 0 to 6.
_LEVELS: Dict[str, int] = {
    "TRACE": 5,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
    "OFF": logging.CRITICAL + 10,
}
_SYNONYMS = {"WARNING": "WARN", "ERROR": "ERR"}


def setLogLevel(level: Union[str, int]) -> None:
    """Set the minimum severity of log messages.

    Args:
        level: "TRACE", "DEBUG", "INFO", "WARN", "ERR", "CRITICAL" or "OFF", or their numbers 0 to 6.

    Raises:
        ValueError: any other level.
    """
    severity = _severity(level)
    if severity is None:
        raise ValueError(f"Unknown log level {level!r}: use {', '.join(_LEVELS)} or 0 to {len(_LEVELS) - 1}")
    logger.setLevel(severity)


def set_level_from_environment() -> None:
    """Set the level to POPTORCH_LOG_LEVEL, a name or a number; WARN if it is unset or unknown."""
    text = os.environ.get("POPTORCH_LOG_LEVEL", "WARN")
    severity = _severity(int(text) if text.isascii() and text.isdigit() else text)
    logger.setLevel(logging.WARNING if severity is None else severity)
    if severity is None:
        logger.warning("Unknown POPTORCH_LOG_LEVEL=%r: using WARN. Valid levels: %s", text, ", ".join(_LEVELS))


def _severity(level: Union[str, int]) -> Optional[int]:
    """Return the level of Python's `logging`; None for an unknown level."""
    if isinstance(level, str):
        name = level.upper()
        return _LEVELS.get(_SYNONYMS.get(name, name))
    if isinstance(level, int) and not isinstance(level, bool) and 0 <= level < len(_LEVELS):
        return list(_LEVELS.values())[level]
    return None


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
