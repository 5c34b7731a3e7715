"""The groups `Training`, `Precision`, `Distributed`, `Jit` and `_Popart` of the options (contract 1.3-1.5, 1.7).

What concerns performance on the device only is accepted, validated and kept.
"""

from __future__ import annotations

import os
import warnings
from typing import Any, Dict

import torch

from poptorch import enums
from poptorch._options.base import OptionsDict, is_integer


class _PopartOptions(OptionsDict):
    """Options of the graph compiler: any key is accepted and kept, as only the compiler could reject it (1.7)."""

    def __init__(self) -> None:
        super().__init__(options={}, patterns={}, patterns_level=2)

    def set(self, *args: Any, **kwargs: Any) -> Any:
        """`set(key, value)` keeps one compiler option."""
        if kwargs:
            super().set(**kwargs)
            return self
        self.checkIsFrozen()
        is_pair = len(args) == 2 and isinstance(args[0], str)
        assert is_pair, f"A compiler option is set by set(name, value), got set{args!r}"
        self.options[args[0]] = args[1]
        return self

    def setEngineOptions(self, engine_options: Dict[str, str]) -> _PopartOptions:
        """Options of the engine, by name."""
        assert isinstance(engine_options, dict), f"Engine options are a dictionary, got {engine_options!r}"
        return self.set("engineOptions", dict(engine_options))  # type: ignore[no-any-return]

    def setPatterns(self, patterns: Dict[str, bool], level: int = 2) -> _PopartOptions:
        """Enable or disable transformations of the graph by name."""
        assert isinstance(patterns, dict), f"Patterns are a dictionary of names and switches, got {patterns!r}"
        self.patterns = dict(patterns)
        self._set_number(0, patterns_level=level)
        return self


class _JitOptions(OptionsDict):
    """Deprecated in the SDK: kept so that old programs run."""

    def __init__(self) -> None:
        super().__init__(trace_model=False)

    def traceModel(self, trace_model: bool) -> _JitOptions:
        """Deprecated; has no effect."""
        self.set(trace_model=trace_model)
        warnings.warn("Jit.traceModel is deprecated and has no effect", DeprecationWarning, stacklevel=2)
        return self


class _TrainingOptions(OptionsDict):
    """How a weight update is made out of micro-batches and replicas."""

    def __init__(self) -> None:
        super().__init__(
            gradient_accumulation=1,
            accumulation_and_replication_reduction_type=enums.ReductionType.Mean,
            mean_accumulation_and_replication_reduction_strategy=enums.MeanReductionStrategy.Post,
            auto_loss_scaling=False,
            convolution_dithering=False,
        )
        self.has_chosen_strategy = False

    def gradientAccumulation(self, gradient_accumulation: int) -> _TrainingOptions:
        """Micro-batches per replica and weight update, at least 1."""
        self._set_number(1, gradient_accumulation=gradient_accumulation)
        return self

    def accumulationAndReplicationReductionType(self, reduction_type: enums.ReductionType) -> _TrainingOptions:
        """Sum or Mean of the gradients over the accumulation steps and the replicas of ALL processes.

        ValueError for NoReduction.
        """
        if reduction_type == enums.ReductionType.NoReduction:
            raise ValueError("Gradients of accumulation and replicas reduce by ReductionType.Sum or ReductionType.Mean")
        self.set(accumulation_and_replication_reduction_type=reduction_type)
        return self

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: enums.MeanReductionStrategy
    ) -> _TrainingOptions:
        """When a mean divides; shows only where gradients accumulate in half (`accum_type=torch.half`).

        Unless it is set, the mean is a running one there, and divides after the sum elsewhere.
        """
        self.set(mean_accumulation_and_replication_reduction_strategy=mean_reduction_strategy)
        self.has_chosen_strategy = True
        return self

    def setAutomaticLossScaling(self, enabled: bool) -> _TrainingOptions:
        """Lets `loss_scaling` change after compilation. It is not adapted: the emulation's gradients are float32."""
        self.set(auto_loss_scaling=enabled)
        return self

    def setConvolutionDithering(self, enabled: bool) -> _TrainingOptions:
        """Accepted: concerns the placement on tiles."""
        self.set(convolution_dithering=enabled)
        return self


class _PrecisionOptions(OptionsDict):
    """Numerical modes of the device."""

    def __init__(self) -> None:
        super().__init__(
            enable_fp_exceptions=False,
            enable_stochastic_rounding=False,
            partials_type=torch.float,
        )

    def enableFloatingPointExceptions(self, enabled: bool) -> _PrecisionOptions:
        """Raise `poptorch.Error` when an output or a weight update holds NaN or infinity."""
        self.set(enable_fp_exceptions=enabled)
        return self

    def enableStochasticRounding(self, enabled: bool) -> _PrecisionOptions:
        """Round half weights up or down at random after each update (seeded by `randomSeed`), else to nearest."""
        self.set(enable_stochastic_rounding=enabled)
        return self

    def setPartialsType(self, dtype: torch.dtype) -> _PrecisionOptions:
        """Type of partial sums: torch.float or torch.half, else ValueError. The emulation accumulates in float32."""
        if dtype not in (torch.float, torch.half):
            raise ValueError(f"Partials are torch.float or torch.half, not {dtype}")
        self.set(partials_type=dtype)
        return self

    def halfFloatCasting(self, half_float_casting: enums.HalfFloatCastingBehavior) -> _PrecisionOptions:
        """Deprecated; has no effect."""
        warnings.warn("Precision.halfFloatCasting is deprecated and has no effect", DeprecationWarning, stacklevel=2)
        self.createOrSet(half_float_casting=half_float_casting)
        return self

    def runningStatisticsAlwaysFloat(self, value: bool) -> _PrecisionOptions:
        """Deprecated; has no effect."""
        warnings.warn(
            "Precision.runningStatisticsAlwaysFloat is deprecated and has no effect", DeprecationWarning, stacklevel=2
        )
        self.createOrSet(running_statistics_always_float=value)
        return self


class _DistributedOptions(OptionsDict):
    """Which of how many processes this one is; read from `OMPI_COMM_WORLD_*` at construction (1.5)."""

    def __init__(self) -> None:
        super().__init__(num_distributed_processes=1, distributed_process_id=0, ipuof_configs={})
        self._read("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")

    def disable(self) -> _DistributedOptions:
        """Back to one process."""
        self._configure(0, 1)
        return self

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> _DistributedOptions:
        """Read the number of processes and the id of this one from these environment variables (absent: 1 and 0)."""
        self._read(var_num_processes, var_process_id)
        return self

    def configureProcessId(self, process_id: int, num_processes: int) -> _DistributedOptions:
        """Say which of how many processes this one is; ValueError unless 0 <= process_id < num_processes."""
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
        # Below the public setters, so that a subclass may block those.
        given = {"process_id": process_id, "num_processes": num_processes}
        wrong = [name for name, value in given.items() if not is_integer(value)]
        assert not wrong, f"{wrong[0]} is an integer, got {given[wrong[0]]!r}"
        if not 0 <= process_id < num_processes:
            raise ValueError(f"Process id {process_id} is not among the {num_processes} processes")
        self.set(num_distributed_processes=num_processes, distributed_process_id=process_id)


def _from_environment(variable: str, default: str) -> int:
    value = os.environ.get(variable, default)
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"The environment variable {variable} is {value!r}, which is no integer") from None
