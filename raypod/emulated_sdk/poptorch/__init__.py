"""The emulated `poptorch`: the public Python API of PopTorch 3.4, computed on the CPU.

Importing it sets `RDMAV_FORK_SAFE=1` if unset, as the SDK does (contract 1.9).
"""

from __future__ import annotations

import os
from typing import Any

from poptorch import _log, enums, ops, optim, options, profiling, testing
from poptorch._data.accessor import AsynchronousDataAccessor
from poptorch._data.loader import DataLoader
from poptorch._device.queries import ipuHardwareIsAvailable, ipuHardwareVersion, isRunningOnIpu
from poptorch._errors import ConfigFileError, Error, RecoverableError, UnrecoverableError
from poptorch._executor.compile_hooks import registerPostCompileHook, registerPreCompileHook
from poptorch._executor.custom_parsers import ICustomArgParser, registerCustomArgParser
from poptorch._executor.executor import PoplarExecutor
from poptorch._executor.wrapping import inferenceModel, load, trainingModel
from poptorch._log import setLogLevel
from poptorch._version import VERSION as __version__
from poptorch.enums import (
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
from poptorch.ops import (
    CPU,
    BeginBlock,
    Block,
    BlockFunction,
    LegacyBeginBlockFn,
    MultiConv,
    NameScope,
    cond,
    ctc_beam_search_decoder,
    custom_op,
    dynamic_slice,
    dynamic_update,
    for_loop,
    fps,
    identity_loss,
    ipu_print_tensor,
    nearest,
    nop,
    recomputationCheckpoint,
    removeBlocks,
    serializedMatMul,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from poptorch.options import (
    Attribute,
    Options,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
    TensorLocationSettings,
)

__all__ = [
    "AsynchronousDataAccessor",
    "Attribute",
    "AutoStage",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "CPU",
    "CommGroupType",
    "ConfigFileError",
    "ConnectionType",
    "DataLoader",
    "DataLoaderMode",
    "Error",
    "HalfFloatCastingBehavior",
    "ICustomArgParser",
    "LegacyBeginBlockFn",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConv",
    "MultiConvPlanType",
    "NameScope",
    "Options",
    "OutputMode",
    "OverlapMode",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "PoplarExecutor",
    "RecoverableError",
    "ReductionType",
    "SerialPhasedExecution",
    "ShardedExecution",
    "SharingStrategy",
    "Stage",
    "SyncPattern",
    "TensorLocationSettings",
    "UnrecoverableError",
    "VariableRetrievalMode",
    "__version__",
    "cond",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "enums",
    "for_loop",
    "fps",
    "identity_loss",
    "inferenceModel",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "ipu_print_tensor",
    "isRunningOnIpu",
    "load",
    "nearest",
    "nop",
    "ops",
    "optim",
    "options",
    "profiling",
    "recomputationCheckpoint",
    "registerCustomArgParser",
    "registerPostCompileHook",
    "registerPreCompileHook",
    "removeBlocks",
    "serializedMatMul",
    "setLogLevel",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
    "testing",
    "trainingModel",
]

os.environ.setdefault("RDMAV_FORK_SAFE", "1")
_log.set_up()


def __getattr__(name: str) -> Any:
    """Say what took the place of a name that SDK 3 has no longer (AttributeError)."""
    now = {"AnchorMode": "OutputMode"}.get(name)
    hint = f": it is called poptorch.{now} since SDK 3.0" if now else ""
    raise AttributeError(f"module 'poptorch' has no attribute {name!r}{hint}")
