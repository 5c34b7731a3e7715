"""`poptorch.poptorch_core`: the names of PopTorch's binary module that programs use."""

from __future__ import annotations

from poptorch.device_mode import compiling_mode
from poptorch.environment import ipuHardwareVersion, setLogLevel
from poptorch.errors import Error, RecoverableError, UnrecoverableError
from poptorch.options.popart_options import validate as _validateOptions  # noqa: F401  # the SDK's name

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
