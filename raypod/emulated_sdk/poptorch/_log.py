"""The logger of the package and its level (contract 1.10: POPTORCH_LOG_LEVEL)."""

from __future__ import annotations

import logging
import os
from typing import Dict, Union

logger = logging.getLogger("poptorch")

_LEVELS: Dict[str, int] = {
    "TRACE": 5,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
    "OFF": logging.CRITICAL + 10,
}
_NUMBERS = ("TRACE", "DEBUG", "INFO", "WARN", "ERR", "CRITICAL", "OFF")


def setLogLevel(level: Union[str, int]) -> None:
    """Set the least severity that is logged: TRACE, DEBUG, INFO, WARN, ERR, CRITICAL or OFF, or 0 to 6.

    ValueError for anything else.
    """
    name = _NUMBERS[level] if isinstance(level, int) and 0 <= level < len(_NUMBERS) else level
    if name not in _LEVELS:
        raise ValueError(f"Unknown log level {level!r}: use {', '.join(_NUMBERS)} or 0 to {len(_NUMBERS) - 1}")
    logger.setLevel(_LEVELS[str(name)])


def set_up() -> None:
    """Take the level from the environment; an unknown one leaves the default, WARN."""
    name = os.environ.get("POPTORCH_LOG_LEVEL", "WARN").upper()
    logger.setLevel(_LEVELS.get(name, logging.WARNING))
