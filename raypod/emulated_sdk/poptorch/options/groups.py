"""The parts of `Options`: its diagnostic setters, and the groups `Training`, `Precision`, `Distributed` and others.

Options that only affect performance on the device are validated and stored, without effect.
"""

from __future__ import annotations

import copy
import os
from types import MappingProxyType
from typing import List, TypeVar

import torch

from poptorch import enums
from poptorch.environment import logger
from poptorch.options.base import OptionsDict, check_member, is_integer, names, path_text
from poptorch.options.popart_options import _PopartOptions

_Self = TypeVar("_Self", bound="DiagnosticOptions")
CAST = "cast in the model: model.half(), or tensor.half() and tensor.float() in forward"


class _TrainingOptions(OptionsDict):
    """How the gradients of micro-batches and replicas form a weight update."""

    _removed = MappingProxyType({"accumulationReductionType": ("2.2", "use accumulationAndReplicationReductionType")})

    def __init__(self, popart: _PopartOptions) -> None:
        super().__init__(
            gradient_accumulation=1,
            accumulation_and_replication_reduction_type=enums.ReductionType.Mean,
            meanAccumulationAndReplicationReductionStrategy=enums.MeanReductionStrategy.Post,
        )
        self._popart = popart

    def gradientAccumulation(self, gradient_accumulation: int) -> _TrainingOptions:
        """Set the number of micro-batches per replica and weight update, at least 1."""
        return self._set_number(1, gradient_accumulation=gradient_accumulation)

    def accumulationAndReplicationReductionType(self, reduction_type: enums.ReductionType) -> _TrainingOptions:
        """Set the reduction of gradients over accumulation steps and the replicas of ALL processes: Sum or Mean.

        Raises:
            ValueError: anything else.
        """
        valid = (enums.ReductionType.Sum, enums.ReductionType.Mean)
        if not isinstance(reduction_type, enums.ReductionType) or reduction_type not in valid:
            raise ValueError(
                "accumulationAndReplicationReductionType must be set to poptorch.ReductionType.Mean or "
                f"poptorch.ReductionType.Sum, not {reduction_type!r}"
            )
        self.set(accumulation_and_replication_reduction_type=reduction_type)
        return self

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: enums.MeanReductionStrategy
    ) -> _TrainingOptions:
        """Set when a mean divides. Affects results only where gradients accumulate in half (`accum_type=torch.half`).

        An optimizer that accumulates in half sets it to Running, unless gradients and velocity share a tensor.
        """
        check_member(mean_reduction_strategy, enums.MeanReductionStrategy)
        self.set(meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy)
        return self

    def setAutomaticLossScaling(self, enabled: bool) -> _TrainingOptions:
        """Double or halve the loss scaling after each update of a model in half; see `numerics.LossScaleUpdates`.

        `loss_scaling` can then change after compilation.
        """
        self._popart.set("automaticLossScalingSettings.enabled", enabled)
        return self

    def setConvolutionDithering(self, enabled: bool) -> _TrainingOptions:
        """Dither convolutions over the tiles. No effect here."""
        self._popart.set("convolutionOptions", {"enableConvDithering": enabled})
        return self


class _PrecisionOptions(OptionsDict):
    """Numerical modes of the device, which are options of the graph compiler."""

    _removed = MappingProxyType(
        {
            "autocastEnabled": ("3.1", CAST),
            "autocastPolicy": ("3.1", CAST),
            "runningVarianceAlwaysFloat": ("2.2", "running statistics have the dtype of the model's buffers"),
        }
    )

    def __init__(self, popart: _PopartOptions) -> None:
        super().__init__()
        self._popart = popart

    def enableFloatingPointExceptions(self, enabled: bool) -> _PrecisionOptions:
        """Raise `poptorch.Error` if an output or a weight update has NaN or infinity; AssertionError unless a bool."""
        assert isinstance(enabled, bool), "enableFloatingPointExceptions needs to be set to a bool"
        self._popart.set("enableFloatingPointChecks", enabled)
        return self

    def enableStochasticRounding(self, enabled: bool) -> _PrecisionOptions:
        """Round half weights stochastically after each update (seeded by `randomSeed`) instead of to nearest."""
        self._popart.set("enableStochasticRounding", enabled)
        return self

    def setPartialsType(self, dtype: torch.dtype) -> _PrecisionOptions:
        """Set the dtype of partial sums: torch.float or torch.half (else ValueError). The emulation uses float32."""
        if dtype not in (torch.float, torch.half):
            raise ValueError(f"The partials type must be torch.float or torch.half, not {dtype}")
        name = "float" if dtype == torch.float else "half"
        self._popart.set("partialsTypeMatMuls", name).set("convolutionOptions", {"partialsType": name})
        return self

    def halfFloatCasting(self, half_float_casting: enums.HalfFloatCastingBehavior) -> _PrecisionOptions:
        """Deprecated; no effect."""
        _warn_deprecated("Precision.halfFloatCasting")
        return self

    def runningStatisticsAlwaysFloat(self, value: bool) -> _PrecisionOptions:
        """Deprecated; no effect. ValueError unless a bool."""
        if not isinstance(value, bool):
            raise ValueError("runningStatisticsAlwaysFloat needs to be set to a bool")
        _warn_deprecated("Precision.runningStatisticsAlwaysFloat")
        return self


class _DistributedOptions(OptionsDict):
    """Id and number of processes; the default is read from OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE."""

    def __init__(self) -> None:
        super().__init__(num_distributed_processes=1, distributed_process_id=0, ipuof_configs={})
        self._read("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")

    def disable(self) -> _DistributedOptions:
        """Use one process."""
        self._configure(0, 1)
        return self

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> _DistributedOptions:
        """Read the number of processes and the process id from these environment variables (default 1 and 0)."""
        self._read(var_num_processes, var_process_id)
        return self

    def configureProcessId(self, process_id: int, num_processes: int) -> _DistributedOptions:
        """Set the process id and the number of processes; ValueError unless 0 <= process_id < num_processes."""
        self._configure(process_id, num_processes)
        return self

    @property
    def processId(self) -> int:
        """Id of this process, from 0."""
        return int(self.distributed_process_id)

    @property
    def numProcesses(self) -> int:
        """Number of processes that train together."""
        return int(self.num_distributed_processes)

    def _read(self, var_num_processes: str, var_process_id: str) -> None:
        self._configure(_from_environment(var_process_id, "0"), _from_environment(var_num_processes, "1"))

    def _configure(self, process_id: int, num_processes: int) -> None:
        # Separate from the public setters, as a subclass may disable those.
        given = {"process_id": process_id, "num_processes": num_processes}
        wrong = [name for name, value in given.items() if not is_integer(value)]
        assert not wrong, f"{wrong[0]} must be an integer, got {given[wrong[0]]!r}"
        if not 0 <= process_id < num_processes:
            raise ValueError(f"Process id {process_id} is out of range for {num_processes} processes")
        self.set(num_distributed_processes=num_processes, distributed_process_id=process_id)


class TensorLocationSettings(OptionsDict):
    """Where one kind of tensor is stored, and when it is sharded; setters return the object."""

    def minElementsForOffChip(self, min_elements: int) -> TensorLocationSettings:
        """Set the minimum number of elements of a tensor stored off chip; AssertionError if negative."""
        return self._set_number(0, minElementsForOffChip=min_elements)

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> TensorLocationSettings:
        """Set the minimum number of elements of a tensor sharded over replicas; AssertionError if negative."""
        return self._set_number(0, minElementsForReplicatedTensorSharding=min_elements)

    def useOnChipStorage(self, use: bool | None = True) -> TensorLocationSettings:
        """Store on chip; None removes the setting."""
        if use is None:
            self.deleteIfExists("onChip")
            return self
        return self._set_flag("onChip", use)

    def useReplicatedTensorSharding(self, use: bool = True) -> TensorLocationSettings:
        """Store only a shard on each replica."""
        return self._set_flag("useReplicatedTensorSharding", use)

    def useIOTilesToLoad(self, use: bool = True) -> TensorLocationSettings:
        """Load through the I/O tiles."""
        return self._set_flag("useIOTilesToLoad", use)

    def useIOTilesToStore(self, use: bool = True) -> TensorLocationSettings:
        """Store through the I/O tiles."""
        return self._set_flag("useIOTilesToStore", use)

    def _set_flag(self, name: str, use: bool) -> TensorLocationSettings:
        assert isinstance(use, bool), f"{name} takes a bool, got {use!r}"
        self.createOrSet(**{name: int(use)})
        return self


class _TensorLocationOptions(OptionsDict):
    """Storage of activations, weights, optimizer state and gradient accumulators; no effect on results."""

    def numIOTiles(self, num_tiles: int) -> _TensorLocationOptions:
        """Set the number of I/O tiles: an even number from 32 to 192 (else AssertionError)."""
        is_valid = is_integer(num_tiles) and 32 <= num_tiles <= 192 and num_tiles % 2 == 0
        assert is_valid, f"numIOTiles must be an even number between 32 and 192. It is {num_tiles!r}"
        self.createOrSet(numIOTiles=num_tiles)
        return self

    def setActivationLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the storage of activations."""
        return self._set_location("location_activation", location)

    def setWeightLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the storage of weights."""
        return self._set_location("location_weight", location)

    def setOptimizerLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the storage of the optimizer state."""
        return self._set_location("location_optimizer", location)

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the storage of gradient accumulators."""
        return self._set_location("location_accumulator", location)

    def _set_location(self, name: str, location: TensorLocationSettings) -> _TensorLocationOptions:
        assert isinstance(location, TensorLocationSettings), f"Expected TensorLocationSettings, got {type(location)}"
        self.createOrSet(**{name: copy.deepcopy(location.toDict())})
        return self


class _JitOptions(OptionsDict):
    """Options that are deprecated in the SDK."""

    def traceModel(self, trace_model: bool) -> _JitOptions:
        """Deprecated; no effect. ValueError for True."""
        _warn_deprecated("Jit.traceModel")
        if trace_model:
            raise ValueError("options.Jit.traceModel(True) is no longer supported")
        return self


class DiagnosticOptions(OptionsDict):
    """The setters for logging, profiling and debug information: a mixin of `Options`, which defines the defaults."""

    _popart: _PopartOptions

    def showCompilationProgressBar(self: _Self, show: bool = True) -> _Self:
        """Show a progress bar on stderr during compilation."""
        self._show_compilation_progress_bar = bool(show)
        return self

    def relaxOptimizerAttributesChecks(self: _Self, relax: bool = True) -> _Self:
        """Do not warn about optimizer attributes that the device ignores."""
        self._relax_optimizer_checks = relax
        return self

    def logDir(self: _Self, log_dir: str) -> _Self:
        """Set the directory of logs."""
        self.set(log_dir=path_text("log_dir", log_dir))
        return self

    def modelName(self: _Self, name: str) -> _Self:
        """Set the name of the model in profiles."""
        assert isinstance(name, str), f"The name of a model must be a string, got {name!r}"
        self.createOrSet(model_name=name)
        return self

    def maxRepeatLogs(self: _Self, max_lines: int | None) -> _Self:
        """Set how often a log line may repeat; None for no limit."""
        return self._set_number(0, max_repeat_logs=(1 << 64) - 1 if max_lines is None else max_lines)

    def logCycleCount(self: _Self, log_cycle_count: bool) -> _Self:
        """Enable `PoplarExecutor.cycleCount()`."""
        self._popart.set("instrumentWithHardwareCycleCounter", log_cycle_count)
        return self

    def enableProfiling(self: _Self, profile_dir: str | None = None) -> _Self:
        """Set the profile directory. The emulated device writes no profile, which is a warning at the compilation."""
        profile = {
            "debug.allowOutOfMemory": "true",
            "autoReport.directory": path_text("profile_dir", profile_dir or "."),
            "autoReport.all": "true",
        }
        self._popart.setEngineOptions({**self._popart.options.get("engineOptions", {}), **profile})
        return self

    def disableModuleNamescope(self: _Self) -> _Self:
        """Leave module names out of debug names."""
        self._module_namescope_enabled = False
        return self

    def sourceLocationExcludes(self: _Self, excludes: List[str]) -> _Self:
        """Set the paths that are left out of source locations."""
        self._source_location_excludes = names("source_location_excludes", excludes)
        return self

    def appendToLocationExcludes(self: _Self, *excludes: str) -> _Self:
        """Add paths that are left out of source locations."""
        further = names("source_location_excludes", excludes)
        self._source_location_excludes = [*self._source_location_excludes, *further]
        return self


def _from_environment(variable: str, default: str) -> int:
    value = os.environ.get(variable, default)
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"The environment variable {variable}={value!r} is not an integer") from None


def _warn_deprecated(setter: str) -> None:
    logger.warning("[Deprecated] Do not call options.%s(): it has no effect", setter)
