"""`poptorch.poptorch_core`: the names of PopTorch's binary module that programs use."""

from __future__ import annotations

from typing import Any, Dict

from poptorch.device_mode import compiling_mode
from poptorch.environment import ipuHardwareVersion, setLogLevel
from poptorch.errors import Error, RecoverableError, UnrecoverableError
from poptorch.options.popart_options import validate

__all__ = [
    "Error",
    "RecoverableError",
    "UnrecoverableError",
    "ipuHardwareVersion",
    "isCompilingWithDispatcher",
    "setLogLevel",
]


def isCompilingWithDispatcher() -> bool:
    """Return whether this thread is compiling a model."""
    return compiling_mode() is not None


def _validateOptions(values: Dict[str, Any]) -> None:
    """Check the values of `Options.toDict()` as the compilation does; Error for unknown names and other types."""
    validate(values)
