"""The emulated `poptorch`: the public Python API of PopTorch 3.4, computed on the CPU.

Importing it sets `RDMAV_FORK_SAFE=1` if the variable is unset, as the SDK does.
"""

from __future__ import annotations

import os
from typing import Any

from poptorch import _args_parser as _args_parser  # programs read these as attributes of the package
from poptorch import _impl as _impl
from poptorch import _logging as _logging
from poptorch import _poplar_executor as _poplar_executor
from poptorch import _utils as _utils
from poptorch import enums, environment, findings, ops, optim, options, poptorch_core, profiling, testing
from poptorch._impl import createPoptorchError as createPoptorchError
from poptorch.custom_operators.registry import tolerate_absent
from poptorch.data.accessor import AsynchronousDataAccessor
from poptorch.data.loader import DataLoader
from poptorch.device_mode import isRunningOnIpu
from poptorch.enums import *  # noqa: F403
from poptorch.environment import VERSION as __version__
from poptorch.environment import ipuHardwareIsAvailable, ipuHardwareVersion, setLogLevel
from poptorch.environment import logger as logger
from poptorch.errors import Error, RecoverableError, UnrecoverableError
from poptorch.executor.compile_context import register_geometric, registerPostCompileHook, registerPreCompileHook
from poptorch.executor.executor import PoplarExecutor, inferenceModel, load, trainingModel
from poptorch.ops import *  # noqa: F403
from poptorch.options import *  # noqa: F403
from poptorch.options.base import hint_of_removed
from poptorch.options.groups import CAST as _CAST
from poptorch.parallel.blocks import module_repr as module_repr
from poptorch.parallel.blocks import print as print
from poptorch.pytree import ICustomArgParser, registerCustomArgParser

__all__ = [
    "AsynchronousDataAccessor",
    "DataLoader",
    "Error",
    "ICustomArgParser",
    "PoplarExecutor",
    "RecoverableError",
    "UnrecoverableError",
    "__version__",
    "enums",
    "inferenceModel",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "isRunningOnIpu",
    "load",
    "module_repr",
    "ops",
    "optim",
    "options",
    "poptorch_core",
    "print",
    "profiling",
    "registerCustomArgParser",
    "registerPostCompileHook",
    "registerPreCompileHook",
    "setLogLevel",
    "testing",
    "trainingModel",
]
__all__ += enums.__all__
__all__ += ops.__all__
__all__ += options.__all__
__all__.sort()

os.environ.setdefault("RDMAV_FORK_SAFE", "1")
environment.set_level_from_environment()
findings.record_warnings(environment.logger)
register_geometric()
tolerate_absent()


_DISPATCH = "a model is always traced by the dispatcher"
_REMOVED = {
    "AnchorMode": ("2.5", "use poptorch.OutputMode"),
    "Compiler": ("3.1", _DISPATCH),
    "IPUScope": ("2.5", "wrap a module by poptorch.inferenceModel"),
    "MultiConvPartialsType": ("2.1", "use torch.float or torch.half"),
    "autocast": ("3.1", _CAST),
    "autocasting": ("3.1", _CAST),
    "experimental": ("3.1", "wrap a module by poptorch.inferenceModel or trainingModel"),
    "hasMLIRSupportOnPlatform": ("3.1", _DISPATCH),
    "hasMlirSupportOnPlatform": ("2.6", _DISPATCH),
    "poptorchCleanUp": ("3.1", "use the executor's destroy()"),
}


def __getattr__(name: str) -> Any:
    """Raise AttributeError; its message names the replacement of a name that PopTorch has removed."""
    raise AttributeError(f"module 'poptorch' has no attribute {name!r}{hint_of_removed(_REMOVED, name)}")
