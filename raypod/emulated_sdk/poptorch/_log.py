"""The logger of the package and its level (contract 1.10: POPTORCH_LOG_LEVEL)."""

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
    """Set the least severity that is logged: TRACE, DEBUG, INFO, WARN, ERR, CRITICAL or OFF, or their numbers 0 to 6.

    ValueError for anything else.
    """
    severity = _severity(level)
    if severity is None:
        raise ValueError(f"Unknown log level {level!r}: use {', '.join(_LEVELS)} or 0 to {len(_LEVELS) - 1}")
    logger.setLevel(severity)


def set_up() -> None:
    """Take the level from POPTORCH_LOG_LEVEL, a name or a number; an unknown one leaves the default, WARN."""
    text = os.environ.get("POPTORCH_LOG_LEVEL", "WARN")
    severity = _severity(int(text) if text.isascii() and text.isdigit() else text)
    logger.setLevel(logging.WARNING if severity is None else severity)
    if severity is None:
        logger.warning("POPTORCH_LOG_LEVEL=%r is unknown: using WARN. Known are %s", text, ", ".join(_LEVELS))


def _severity(level: Union[str, int]) -> Optional[int]:
    """The level as a number of Python's; None for an unknown one."""
    if isinstance(level, str):
        name = level.upper()
        return _LEVELS.get(_SYNONYMS.get(name, name))
    if isinstance(level, int) and not isinstance(level, bool) and 0 <= level < len(_LEVELS):
        return list(_LEVELS.values())[level]
    return None
