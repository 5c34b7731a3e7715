"""`poptorch.Options`: the options of model wrappers and data loaders."""

from __future__ import annotations

import copy
import os
import re
from types import MappingProxyType
from typing import Any, Dict, List, TypeVar

import torch

from poptorch import enums
from poptorch.errors import ConfigFileError
from poptorch.options.base import apply_file, apply_json, check_member, is_integer, names, path_text
from poptorch.options.groups import (
    DiagnosticOptions,
    TensorLocationSettings,
    _DistributedOptions,
    _JitOptions,
    _PrecisionOptions,
    _TensorLocationOptions,
    _TrainingOptions,
)
from poptorch.options.popart_options import _PopartOptions
from poptorch.options.strategies import (
    Attribute,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
    _IExecutionStrategy,
)

__all__ = [
    "Attribute",
    "ConfigFileError",
    "Options",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
    "TensorLocationSettings",
]

_Self = TypeVar("_Self", bound="Options")


class Options(DiagnosticOptions):
    """All options of one model; every setter returns the object.

    Attributes give the values: `options.replication_factor`, `options.Training.gradient_accumulation`. The first data
    loader or model that uses the object freezes it (AttributeError on change); `clone()` returns an unfrozen copy. The
    constructor reads the environment variables OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK, POPTORCH_CACHE_DIR and
    POPTORCH_DEFAULT_OPTIONS.
    """

    _removed = MappingProxyType(
        {
            "anchorMode": ("2.5", "use outputMode"),
            "anchor_mode": ("2.5", "use output_mode"),
            "defaultAnchorMode": ("2.5", "use defaultOutputMode"),
            "Popart": ("2.1", "use _Popart"),
        }
    )

    def __init__(self) -> None:
        super().__init__(
            replication_factor=1,
            input_group_size=1,
            input_cgt=enums.CommGroupType.Consecutive,
            broadcast_buffers=True,
            device_iterations=1,
            log_dir=".",
            max_repeat_logs=4,
            auto_round_num_ipus=False,
            anchored_tensors={},
            output_mode=enums.OutputMode.Default,
            output_return_period=1,
            connection_type=enums.ConnectionType.Always,
            sync_pattern=enums.SyncPattern.Full,
            available_memory_proportion={},
        )
        self._popart = _PopartOptions()
        self._training = _TrainingOptions(self._popart)
        self._precision = _PrecisionOptions(self._popart)
        self._distributed = _DistributedOptions()
        self._tensor_locations = _TensorLocationOptions()
        self._jit = _JitOptions()
        self._execution_strategy: _IExecutionStrategy = PipelinedExecution()
        self._show_compilation_progress_bar = True
        self._relax_optimizer_checks = False
        self._module_namescope_enabled = True
        self._source_location_excludes: List[str] = []
        cache = os.environ.get("POPTORCH_CACHE_DIR")
        if cache:
            self.enableExecutableCaching(cache)
        defaults = os.environ.get("POPTORCH_DEFAULT_OPTIONS")
        if defaults:
            self.from_json(defaults)

    @property
    def Training(self) -> _TrainingOptions:
        """Options of training."""
        return self._training

    @property
    def Precision(self) -> _PrecisionOptions:
        """Options of numerical precision."""
        return self._precision

    @property
    def Distributed(self) -> _DistributedOptions:
        """Options of training in several processes."""
        return self._distributed

    @property
    def TensorLocations(self) -> _TensorLocationOptions:
        """Options of tensor storage."""
        return self._tensor_locations

    @property
    def Jit(self) -> _JitOptions:
        """Deprecated options of tracing."""
        return self._jit

    @property
    def _Popart(self) -> _PopartOptions:
        """Options of the graph compiler."""
        return self._popart

    # -- batches and outputs -----------------------------------------------------------------------------------------

    def deviceIterations(self: _Self, device_iterations: int) -> _Self:
        """Set the iterations of the device loop per call, at least 1; in training each makes one weight update."""
        return self._set_number(1, device_iterations=device_iterations)

    def replicationFactor(self: _Self, replication_factor: int) -> _Self:
        """Set the number of replicas of THIS process, at least 1."""
        return self._set_number(1, replication_factor=replication_factor)

    def inputReplicaGrouping(self: _Self, input_group_size: int, input_group_type: enums.CommGroupType) -> _Self:
        """Let the replicas of a group read the same input. NoGrouping means size 1.

        Raises:
            ValueError: CommGroupType.All, or a size that does not divide the present replication factor.
        """
        if input_group_type == enums.CommGroupType.All:
            raise ValueError(
                "Input replica grouping takes Consecutive, Orthogonal or NoGrouping, not CommGroupType.All"
            )
        check_member(input_group_type, enums.CommGroupType)
        if input_group_type == enums.CommGroupType.NoGrouping:
            input_group_size, input_group_type = 1, enums.CommGroupType.Consecutive
        is_size = is_integer(input_group_size) and input_group_size > 0
        assert is_size, f"An input group has at least one replica, got {input_group_size!r}"
        if self.replication_factor % input_group_size:
            raise ValueError(
                f"input_group_size {input_group_size} must be a factor of replication_factor {self.replication_factor}"
            )
        self.set(input_group_size=int(input_group_size), input_cgt=input_group_type)
        return self

    def outputMode(self: _Self, output_mode: enums.OutputMode, output_return_period: int | None = None) -> _Self:
        """Set which micro-batches' outputs a call returns. EveryN needs a period of at least 1 (AssertionError)."""
        check_member(output_mode, enums.OutputMode)
        period = _period(output_mode, output_return_period)
        if output_mode != enums.OutputMode.EveryN and output_return_period:
            period = output_return_period  # stored without effect, as in the SDK, which checks only its type
        self.set(output_mode=output_mode, output_return_period=period)
        return self

    def defaultOutputMode(self) -> bool:
        """Return whether the kind of model determines the output mode."""
        return bool(self.output_mode == enums.OutputMode.Default)

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: enums.OutputMode | None = None,
        output_return_period: int | None = 1,
    ) -> None:
        """Make `getAnchoredTensor(short_name)` return the internal tensor `long_name` (see `getTensorNames()`).

        Without an output mode the tensor has the output mode and period of the model's outputs.
        """
        self.checkIsFrozen("anchored_tensors")
        named = isinstance(short_name, str) and isinstance(long_name, str)
        assert named, f"The names of an anchor must be strings, got {short_name!r} and {long_name!r}"
        if output_mode is not None:
            check_member(output_mode, enums.OutputMode)
        period = _period(output_mode, output_return_period)
        self.anchored_tensors[short_name] = [long_name, output_mode is None, output_mode, period]

    def broadcastBuffers(self: _Self, broadcast_buffers: bool = True) -> _Self:
        """With True, a forward that changes a buffer raises an error if there are several input groups."""
        self.set(broadcast_buffers=broadcast_buffers)
        return self

    # -- numerics ----------------------------------------------------------------------------------------------------

    def randomSeed(self: _Self, random_seed: int) -> _Self:
        """Seed the device, the distributed shuffle AND torch on the host (`torch.manual_seed`)."""
        assert is_integer(random_seed), f"A random seed must be an integer, got {random_seed!r}"
        self.createOrSet(random_seed=int(random_seed))
        torch.manual_seed(int(random_seed))
        return self

    def enableStableNorm(self: _Self, enabled: bool) -> _Self:
        """No effect here: torch computes the norms."""
        self._popart.set("enableStableNorm", enabled)
        return self

    def enableSyntheticData(self: _Self, enabled: bool) -> _Self:
        """Run on data generated on the device: inputs are not read, and outputs are zeros of the right shapes."""
        self._popart.set("syntheticDataMode", 2 if enabled else 0)  # 2: random normal
        return self

    def updatableNamedBuffers(self: _Self, buffers: List[str]) -> _Self:
        """Set the names of the buffers that `copyNamedBuffersToDevice()` uploads."""
        self._popart.set("updatableNamedBuffers", names("updatable_named_buffers", buffers))
        return self

    # -- devices -----------------------------------------------------------------------------------------------------

    def autoRoundNumIPUs(self: _Self, auto_round_num_ipus: bool = True) -> _Self:
        """Round the number of IPUs up to a power of two."""
        self.set(auto_round_num_ipus=auto_round_num_ipus)
        return self

    def setExecutionStrategy(self: _Self, strategy: _IExecutionStrategy) -> _Self:
        """Set how stages share the IPUs of a replica; the default is `PipelinedExecution()`.

        Results do not depend on the strategy. AssertionError for anything that is not a strategy.
        """
        self.checkIsFrozen("execution_strategy")
        is_strategy = isinstance(strategy, _IExecutionStrategy)
        assert is_strategy, f"Expected an execution strategy such as poptorch.ShardedExecution(), got {strategy!r}"
        self._execution_strategy = strategy
        return self

    def setAvailableMemoryProportion(self: _Self, available_memory_proportion: Dict[str, float]) -> _Self:
        """Set the share of memory for temporaries, e.g. {"IPU0": 0.2}; AssertionError if not in [0, 1]."""
        is_dict = isinstance(available_memory_proportion, dict)
        assert is_dict, f"Expected a dictionary such as {{'IPU0': 0.2}}, got {available_memory_proportion!r}"
        for ipu, proportion in available_memory_proportion.items():
            assert re.fullmatch("IPU[0-9]+", str(ipu)), f"An IPU name must be 'IPU<number>', got {ipu!r}"
            is_share = isinstance(proportion, (int, float)) and 0 <= proportion <= 1
            assert is_share, f"A memory proportion must be between 0 and 1, got {proportion} for {ipu}"
        self.set(
            available_memory_proportion={int(ipu[3:]): share for ipu, share in available_memory_proportion.items()}
        )
        return self

    def connectionType(self: _Self, connection_type: enums.ConnectionType) -> _Self:
        """Set when the device is acquired; with Never every call raises an error."""
        check_member(connection_type, enums.ConnectionType)
        self.set(connection_type=connection_type)
        return self

    def syncPattern(self: _Self, sync_pattern: enums.SyncPattern) -> _Self:
        """Set how the IPUs of a replica synchronize."""
        check_member(sync_pattern, enums.SyncPattern)
        self.set(sync_pattern=sync_pattern)
        return self

    def useIpuModel(self: _Self, use_model: bool) -> _Self:
        """No effect here: every device is emulated."""
        self.createOrSet(use_model=use_model)
        return self

    def useIpuId(self: _Self, ipu_id: int) -> _Self:
        """Set the id of the device; AssertionError unless a non-negative integer."""
        return self._set_number(0, ipu_id=ipu_id)

    def useOfflineIpuTarget(self: _Self, ipu_version: int = 2) -> _Self:
        """Compile without a device; also sets ConnectionType.Never."""
        return self._set_number(0, ipu_version=ipu_version).connectionType(enums.ConnectionType.Never)

    def enableExecutableCaching(self: _Self, path: str | None) -> _Self:
        """Set the directory of the executable cache; None for no cache. No effect: nothing is written to it.

        Compilation here is one forward of one micro-batch, and no cache key could detect a change of the model's
        Python code. A program that guarantees it can use `PoplarExecutor.save` and `loadExecutable` instead.
        """
        if path is not None:
            self._popart.set("cachePath", path_text("cachePath", path))
        self._popart.set("enableEngineCaching", path is not None)
        return self

    # -- all options -------------------------------------------------------------------------------------------------

    def from_json(self: _Self, string: str) -> _Self:
        """Call the setters in a JSON object, e.g. {"Training.gradientAccumulation": 4}; see `apply_json`."""
        apply_json(self, string)
        return self

    def loadFromFile(self: _Self, filepath: str) -> _Self:
        """Apply a text file with one setter per line; see `apply_file`. ConfigFileError for an invalid line."""
        apply_file(self, filepath)
        return self

    def toDict(self) -> Dict[str, Any]:
        """Return all values as one flat dictionary of plain Python objects; AssertionError without an output mode."""
        assert not self.defaultOutputMode(), "An output mode must be picked before serialisation"
        merged = {**self._execution_strategy.backendOptions(), **self._popart.options}
        for group in (self._training, self._distributed, self._tensor_locations):
            merged = group.update(merged)
        return self.update(merged)

    def clone(self: _Self) -> _Self:
        """Return an unfrozen deep copy."""
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        groups = ("Distributed", "Jit", "Precision", "TensorLocations", "Training", "_Popart")
        texts = [f"{name}={value!r}" for name, value in self._values.items()]
        texts += [f"{name}={getattr(self, name)!r}" for name in groups]
        return f"{type(self).__name__}({', '.join(texts)})"


def _period(mode: enums.OutputMode | None, period: int | None) -> int:
    """Return the period of an output mode, 1 except for EveryN; AssertionError for an invalid period of EveryN."""
    if mode != enums.OutputMode.EveryN:
        return 1
    given = is_integer(period) and int(period or 0) > 0
    assert given, f"OutputMode.EveryN needs output_return_period >= 1, got {period!r}"
    return int(period or 1)
