"""Pipeline splits that minimize the estimated memory of the fullest IPU, with activations and optimizer state.

The model is compiled once on the emulated SDK, each unit in a stage of its own; the estimate of every division merges
these stages. A process that has called `splits_by_memory` cannot use the real SDK any more.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, List, Sequence, Tuple

from raypod.errors import ConfigError
from raypod.plan import user_code
from raypod.plan.plan import Plan
from raypod.plan.stages import Stage, splits_of
from raypod.system import sdk
from raypod.training.models import pipeline


def splits_by_memory(plan: Plan, task: Any) -> Tuple[str, ...]:
    """Return the splits of a plan's model.

    Raises:
        ConfigError: the model cannot be divided over so many IPUs, or not be compiled.
    """
    sdk.select("emulated")
    from raypod.training.models import pipeline_table

    with user_code.reported(plan.config.model_name):
        network = pipeline.network_of(task)
        called = pipeline.called_units(network, pipeline.inputs_of(task))
    names, tied = [name for name, _ in called], pipeline.tied_unit(called)
    if tied is not None and tied.home != names[0]:
        raise ConfigError(
            f"--pipeline-balance memory: {tied.module} shares a parameter with {tied.home}, which is not the first "
            "module; choose the stages with --pipeline-splits, as MODULE=IPU"
        )
    model = pipeline_table.compiled(_one_stage_each(plan, names), task)
    if len(model.emulatedPlacement().stages) != len(names):
        raise ConfigError("--pipeline-balance memory: a module of the model computes nothing; use parameters")
    ipus, is_pipelined = plan.geometry.ipus_per_replica, plan.config.training.execution == "pipelined"
    factor = pipeline_table.micro_batch_factor(plan)
    own = names[:-1] if tied is not None else names
    last = [(0, [len(names) - 1])] if tied is not None else []  # on the IPU of the first stage

    @functools.lru_cache(maxsize=None)
    def total(stage: int, first: int, end: int) -> float:
        stages: List[Tuple[int, Sequence[int]]] = [
            (ipu, range(first, end) if ipu == stage else ()) for ipu in range(ipus)
        ]
        found = model.emulatedMemory(factor, plan.geometry.local_replicas, [*stages, *last], is_pipelined)
        return float(found[stage].total)

    begins = [Stage(own[cut], ipu) for ipu, cut in enumerate(pipeline.divide(own, ipus, total)) if ipu]
    return splits_of([*begins, *([Stage(tied.module, 0)] if tied is not None else [])])


def _one_stage_each(plan: Plan, names: Sequence[str]) -> Plan:
    """Return the plan with a stage for each unit, in turns on two IPUs, without the limits of a pipeline."""
    training = plan.config.training.model_copy(update={"execution": "sharded"})
    stages = [Stage(name, index % 2) for index, name in enumerate(names) if index]
    config = plan.config.model_copy(update={"training": training})
    return dataclasses.replace(plan, config=config, pipeline_splits=splits_of(stages))
