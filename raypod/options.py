"""What the SDK is told of a plan: the options of the training and of the inference program of an instance."""

from __future__ import annotations

from typing import Any

import popdist.poptorch
import poptorch

from raypod import steps
from raypod.plan import Plan

_REDUCTIONS = {"sum": poptorch.ReductionType.Sum, "mean": poptorch.ReductionType.Mean}


def training_options(plan: Plan) -> Any:
    """`popdist.poptorch.Options` for the training program; replicas come from the environment of the instance."""
    training = plan.config.training
    options = _common_options(plan)
    options.deviceIterations(training.device_iterations)
    options.Training.gradientAccumulation(training.gradient_accumulation)
    options.Training.accumulationAndReplicationReductionType(_REDUCTIONS[training.reduction])
    # Loss and count of right predictions are all that comes back, so every one of them may.
    options.outputMode(poptorch.OutputMode.All)
    return options


def inference_options(plan: Plan) -> Any:
    """The same for the program that evaluates."""
    options = _common_options(plan)
    options.deviceIterations(plan.geometry.evaluation_iterations)
    return options.outputMode(poptorch.OutputMode.All)


def _common_options(plan: Plan) -> Any:
    options = popdist.poptorch.Options(ipus_per_replica=plan.geometry.ipus_per_replica)
    options.randomSeed(plan.config.training.seed)
    options.showCompilationProgressBar(False)
    options.setExecutionStrategy(steps.execution_strategy(plan.config.training.execution))
    if plan.config.pod.executable_cache_path is not None:
        options.enableExecutableCaching(plan.config.pod.executable_cache_path)
    return options
