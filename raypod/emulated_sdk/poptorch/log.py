"""The logger of the package. The environment variable POPTORCH_LOG_LEVEL sets its level."""

from __future__ import annotations

import logging
import os
from typing import Dict, Optional, Union

logger = logging.getLogger("poptorch")

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
