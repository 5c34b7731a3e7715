"""`poptorch._logging`: the logger of PopTorch, by the names that programs import."""

from __future__ import annotations

from poptorch.environment import logger, setLogLevel

__all__ = ["logger", "setLogLevel"]
