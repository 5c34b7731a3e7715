"""`poptorch.Options`: what a model wrapper and a data loader need to know (contract 1.1, 1.2)."""

from __future__ import annotations

import functools
import os
import re
from types import MappingProxyType
from typing import Any, Dict, List, TypeVar

import torch

from poptorch import enums
from poptorch._errors import ConfigFileError
from poptorch._options.base import is_integer, names, path_text
from poptorch._options.diagnostics import _DiagnosticOptions
from poptorch._options.locations import TensorLocationSettings, _TensorLocationOptions
from poptorch._options.sections import (
    _DistributedOptions,
    _JitOptions,
    _PopartOptions,
    _PrecisionOptions,
    _TrainingOptions,
)
from poptorch._options.text import apply_file, apply_json
from poptorch._parallel.attribute import Attribute
from poptorch._parallel.stages import Phase, Stage
from poptorch._parallel.strategies import (
    ParallelPhasedExecution,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
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


class Options(_DiagnosticOptions):
    """All options of one model; every setter returns the object.

    Values are read as attributes (`options.replication_factor`, `options.Training.gradient_accumulation`). The object
    is frozen by the first data loader or model that uses it (AttributeError on change); `clone()` gives a free copy.
    At construction `OMPI_COMM_WORLD_SIZE/RANK`, `POPTORCH_CACHE_DIR` and `POPTORCH_DEFAULT_OPTIONS` are read.
    """

    _renamed = MappingProxyType({"anchorMode": "outputMode", "anchor_mode": "output_mode", "Popart": "_Popart"})

    def __init__(self) -> None:
        super().__init__(
            replication_factor=1,
            input_group_size=1,
            input_group_type=enums.CommGroupType.Consecutive,
            device_iterations=1,
            log_dir=".",
            model_name="",
            auto_round_num_ipus=False,
            anchored_tensors={},
            output_mode=enums.OutputMode.Default,
            output_return_period=1,
            connection_type=enums.ConnectionType.Always,
            sync_pattern=enums.SyncPattern.Full,
            available_memory_proportion={},
            broadcast_buffers=True,
            show_compilation_progress_bar=True,
            relax_optimizer_checks=False,
            stable_norm=False,
            enable_synthetic_data=False,
            log_cycle_count=False,
            module_namescope_enabled=True,
            source_location_excludes=[],
            updatable_named_buffers=[],
            max_repeat_logs=4,
        )
        self._training = _TrainingOptions()
        self._precision = _PrecisionOptions()
        self._distributed = _DistributedOptions()
        self._tensor_locations = _TensorLocationOptions()
        self._jit = _JitOptions()
        self._popart = _PopartOptions()
        self._execution_strategy: _IExecutionStrategy = PipelinedExecution()
        self._read_environment()

    def _read_environment(self) -> None:
        cache = os.environ.get("POPTORCH_CACHE_DIR")
        if cache:
            self.enableExecutableCaching(cache)
        defaults = os.environ.get("POPTORCH_DEFAULT_OPTIONS")
        if defaults:
            self.from_json(defaults)

    @property
    def Training(self) -> _TrainingOptions:
        """Options of training (contract 1.3)."""
        return self._training

    @property
    def Precision(self) -> _PrecisionOptions:
        """Options of numerical precision (contract 1.4)."""
        return self._precision

    @property
    def Distributed(self) -> _DistributedOptions:
        """Options of training in several processes (contract 1.5)."""
        return self._distributed

    @property
    def TensorLocations(self) -> _TensorLocationOptions:
        """Options of tensor storage (contract 1.6)."""
        return self._tensor_locations

    @property
    def Jit(self) -> _JitOptions:
        """Deprecated options of tracing."""
        return self._jit

    @property
    def _Popart(self) -> _PopartOptions:
        """Options of the graph compiler (contract 1.7)."""
        return self._popart

    # -- what a batch is and what a call returns ---------------------------------------------------------------------

    def deviceIterations(self: _Self, device_iterations: int) -> _Self:
        """Runs of the loop on the device per call, at least 1; in training one weight update each."""
        self._set_number(1, device_iterations=device_iterations)
        return self

    def replicationFactor(self: _Self, replication_factor: int) -> _Self:
        """Replicas driven by THIS process, at least 1."""
        self._set_number(1, replication_factor=replication_factor)
        return self

    def inputReplicaGrouping(self: _Self, input_group_size: int, input_group_type: enums.CommGroupType) -> _Self:
        """Replicas of one group read the same input. NoGrouping means size 1; ValueError for All.

        The size must divide the replication factor (checked where it is used, as that may still change).
        """
        if input_group_type == enums.CommGroupType.All:
            raise ValueError(
                "Input replica grouping takes CommGroupType.Consecutive, Orthogonal or NoGrouping, not All"
            )
        no_grouping = input_group_type == enums.CommGroupType.NoGrouping
        self._set_number(1, input_group_size=1 if no_grouping else input_group_size)
        self.set(input_group_type=input_group_type)
        return self

    def outputMode(self: _Self, output_mode: enums.OutputMode, output_return_period: int | None = None) -> _Self:
        """Which micro-batches' outputs a call returns. EveryN needs a period of at least 1 (AssertionError)."""
        period = _period(output_mode, output_return_period)
        self.set(output_mode=output_mode, output_return_period=period)
        return self

    def defaultOutputMode(self) -> bool:
        """Whether the output mode is still to be chosen by the kind of model."""
        return bool(self.output_mode == enums.OutputMode.Default)

    def anchorTensor(
        self: _Self,
        short_name: str,
        long_name: str,
        output_mode: enums.OutputMode | None = None,
        output_return_period: int | None = 1,
    ) -> _Self:
        """Ask for an internal tensor by its long name (`getTensorNames()`); `getAnchoredTensor(short_name)` has it."""
        self.checkIsFrozen("anchored_tensors")
        named = isinstance(short_name, str) and isinstance(long_name, str)
        assert named, f"The names of an anchor are strings, got {short_name!r} and {long_name!r}"
        mode = enums.OutputMode(self.output_mode if output_mode is None else output_mode)
        self.anchored_tensors[short_name] = [long_name, mode, _period(mode, output_return_period)]
        return self

    def broadcastBuffers(self: _Self, broadcast_buffers: bool = True) -> _Self:
        """With True, a forward that changes a buffer is refused when there are several input groups."""
        self.set(broadcast_buffers=broadcast_buffers)
        return self

    # -- numerics ----------------------------------------------------------------------------------------------------

    def randomSeed(self: _Self, random_seed: int) -> _Self:
        """Seed of the device, of the distributed shuffle AND of torch on the host (`torch.manual_seed`)."""
        assert is_integer(random_seed), f"A random seed is an integer, got {random_seed!r}"
        self.createOrSet(random_seed=int(random_seed))
        torch.manual_seed(int(random_seed))
        return self

    def enableStableNorm(self: _Self, enabled: bool) -> _Self:
        """Accepted: norms are computed by torch."""
        self.set(stable_norm=enabled)
        return self

    def enableSyntheticData(self: _Self, enabled: bool) -> _Self:
        """Run on numbers of the device's own: inputs are not read, and outputs are zeros of the right shapes."""
        self.set(enable_synthetic_data=enabled)
        return self

    def updatableNamedBuffers(self: _Self, buffers: List[str]) -> _Self:
        """Names of the buffers that `copyNamedBuffersToDevice()` refreshes."""
        self.set(updatable_named_buffers=names("updatable_named_buffers", buffers))
        return self

    # -- devices -----------------------------------------------------------------------------------------------------

    def autoRoundNumIPUs(self: _Self, auto_round_num_ipus: bool = True) -> _Self:
        """Round the number of IPUs up to a power of two."""
        self.set(auto_round_num_ipus=auto_round_num_ipus)
        return self

    def setExecutionStrategy(self: _Self, strategy: _IExecutionStrategy) -> _Self:
        """How stages share the IPUs of a replica: `PipelinedExecution()`, the default, or another strategy.

        AssertionError for anything else. Results do not depend on it.
        """
        self.checkIsFrozen("execution_strategy")
        is_strategy = isinstance(strategy, _IExecutionStrategy)
        assert is_strategy, f"Expected an execution strategy, as poptorch.ShardedExecution(), got {strategy!r}"
        self._execution_strategy = strategy
        return self

    def setAvailableMemoryProportion(self: _Self, available_memory_proportion: Dict[str, float]) -> _Self:
        """Share of memory for temporaries, e.g. {"IPU0": 0.2}; AssertionError for other names or shares."""
        is_dict = isinstance(available_memory_proportion, dict)
        assert is_dict, f"Expected a dictionary as {{'IPU0': 0.2}}, got {available_memory_proportion!r}"
        for ipu, proportion in available_memory_proportion.items():
            assert re.fullmatch("IPU[0-9]+", str(ipu)), f"IPUs are named 'IPU<number>', got {ipu!r}"
            is_share = isinstance(proportion, (int, float)) and 0 <= proportion <= 1
            assert is_share, f"A memory proportion is between 0 and 1, got {proportion} for {ipu}"
        self.set(available_memory_proportion=dict(available_memory_proportion))
        return self

    def connectionType(self: _Self, connection_type: enums.ConnectionType) -> _Self:
        """When the device is acquired; Never allows no call."""
        self.set(connection_type=connection_type)
        return self

    def syncPattern(self: _Self, sync_pattern: enums.SyncPattern) -> _Self:
        """How the IPUs of a replica synchronise."""
        self.set(sync_pattern=sync_pattern)
        return self

    def useIpuModel(self: _Self, use_model: bool) -> _Self:
        """Accepted: every device here is emulated."""
        self._set_typed(bool, use_model=use_model)
        return self

    def useIpuId(self: _Self, ipu_id: int) -> _Self:
        """Use this device; AssertionError unless a non-negative integer."""
        self._set_number(0, ipu_id=ipu_id)
        return self

    def useOfflineIpuTarget(self: _Self, ipu_version: int = 2) -> _Self:
        """Compile only: also sets ConnectionType.Never."""
        self._set_number(0, ipu_version=ipu_version)
        self.connectionType(enums.ConnectionType.Never)
        return self

    def enableExecutableCaching(self: _Self, path: str | None) -> _Self:
        """Directory of the executable cache, None for none. Kept, but nothing is written to it.

        Compiling here is one forward of one micro-batch, and no key could tell that the Python code behind it is the
        same as before. `PoplarExecutor.save` and `loadExecutable` leave it out where a program knows that.
        """
        if path is None:
            self.deleteIfExists("cache_path")
        else:
            self.createOrSet(cache_path=path_text("cache_path", path))
        return self

    # -- as a whole --------------------------------------------------------------------------------------------------

    def from_json(self: _Self, string: str) -> _Self:
        """Apply a JSON object of dotted setters, e.g. {"Training.gradientAccumulation": 4}; see `_options/text.py`."""
        apply_json(self, string)
        return self

    def loadFromFile(self: _Self, filepath: str) -> _Self:
        """Apply a text file with one setter a line; see `_options/text.py`. ConfigFileError names the line."""
        apply_file(self, filepath)
        return self

    def toDict(self) -> Dict[str, Any]:
        """All values in one flat dictionary of plain Python."""
        own = {**super().toDict(), **self._execution_strategy._to_dict(), **self._place_among_replicas()}
        return functools.reduce(lambda merged, group: group.update(merged), self._groups().values(), own)

    def _place_among_replicas(self) -> Dict[str, Any]:
        """What a distributed run adds to the options of the compiler (contract 1.5)."""
        distributed = self._distributed
        if distributed.numProcesses == 1:
            return {}
        return {
            "enableDistributedReplicatedGraphs": True,
            "globalReplicationFactor": distributed.numProcesses * self.replication_factor,
            "globalReplicaOffset": distributed.processId * self.replication_factor,
        }

    def clone(self: _Self) -> _Self:
        """An unfrozen deep copy."""
        return self._unfrozen_copy()


def _period(mode: enums.OutputMode, period: int | None) -> int:
    """The period of an output mode: 1 but for EveryN, which needs one (AssertionError)."""
    if mode != enums.OutputMode.EveryN:
        return 1
    given = is_integer(period) and int(period or 0) > 0
    assert given, f"OutputMode.EveryN needs output_return_period >= 1, got {period!r}"
    return int(period or 1)
