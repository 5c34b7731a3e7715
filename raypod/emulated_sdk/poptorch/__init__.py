"""The emulated `poptorch`: the public Python API of PopTorch 3.4, computed on the CPU.

Importing it sets `RDMAV_FORK_SAFE=1` if unset, as the SDK does (contract 1.9).
"""

from __future__ import annotations

import os

from . import _log, enums, optim, options
from ._data.loader import DataLoader
from ._device.loss_rule import identity_loss
from ._device.queries import ipuHardwareIsAvailable, ipuHardwareVersion, isRunningOnIpu
from ._errors import ConfigFileError, Error, RecoverableError, UnrecoverableError
from ._executor.compile_hooks import registerPostCompileHook, registerPreCompileHook
from ._executor.custom_parsers import ICustomArgParser, registerCustomArgParser
from ._executor.executor import PoplarExecutor, inferenceModel, trainingModel
from ._log import setLogLevel
from ._version import VERSION as __version__
from .enums import (
    AutoStage,
    CommGroupType,
    ConnectionType,
    DataLoaderMode,
    HalfFloatCastingBehavior,
    Liveness,
    MatMulSerializationMode,
    MeanReductionStrategy,
    MultiConvPlanType,
    OutputMode,
    OverlapMode,
    ReductionType,
    SharingStrategy,
    SyncPattern,
    VariableRetrievalMode,
)
from .options import Options, TensorLocationSettings

__all__ = [
    "AutoStage",
    "CommGroupType",
    "ConfigFileError",
    "ConnectionType",
    "DataLoader",
    "DataLoaderMode",
    "Error",
    "HalfFloatCastingBehavior",
    "ICustomArgParser",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConvPlanType",
    "Options",
    "OutputMode",
    "OverlapMode",
    "PoplarExecutor",
    "RecoverableError",
    "ReductionType",
    "SharingStrategy",
    "SyncPattern",
    "TensorLocationSettings",
    "UnrecoverableError",
    "VariableRetrievalMode",
    "__version__",
    "enums",
    "identity_loss",
    "inferenceModel",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "isRunningOnIpu",
    "optim",
    "options",
    "registerCustomArgParser",
    "registerPostCompileHook",
    "registerPreCompileHook",
    "setLogLevel",
    "trainingModel",
]

os.environ.setdefault("RDMAV_FORK_SAFE", "1")
_log.set_up()
