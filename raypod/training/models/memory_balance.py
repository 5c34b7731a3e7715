"""Pipeline splits that minimize the estimated memory of the fullest IPU, with activations and optimizer state.

The model is compiled once on the emulated SDK, each unit in a stage of its own; the estimate of every division merges
these stages. A process that has called `splits_by_memory` cannot use the real SDK any more.

The estimated memory of each IPU of a replica as bars, and as JSON data.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Dict, List, Sequence, Tuple

from raypod.errors import ConfigError
from raypod.plan import user_code
from raypod.plan.plan import Plan
from raypod.plan.values import Stage, splits_of
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


_WIDTH = 40  # characters of a bar, which stand for the memory of an IPU
_PARTS = (("weights", "w"), ("gradients", "g"), ("optimizer", "o"), ("activations", "a"), ("code", "c"))


def describe_memory(ipus: Sequence[Any]) -> Dict[str, Any]:
    """Return the emulated SDK's estimate for each IPU as JSON data."""
    described = [{**each._asdict(), "total": each.total, "share": round(each.share, 4)} for each in ipus]
    return {"is_estimate": True, "bytes_per_ipu": ipus[0].available, "ipus": described}


def render_memory(ipus: Sequence[Any]) -> str:
    """Return a bar for each IPU; the bar of an IPU whose memory does not suffice ends with `!`."""
    legend = ", ".join(f"{letter} {name}" for name, letter in _PARTS)
    title = f"an estimate for Mk2 IPUs with {ipus[0].available / 1e6:.0f} MB, per replica"
    lines = [f"{'memory':>12}  {title}", f"{'':>12}  ({legend} and exchange)"]
    return "\n".join([*lines, *map(_line, ipus)])


def _line(ipu: Any) -> str:
    parts = ", ".join(f"{letter} {getattr(ipu, name) / 1e6:.1f}" for name, letter in _PARTS)
    note = ": DOES NOT FIT" if ipu.share > 1 else ": nearly full" if ipu.is_nearly_full else ""
    return f"{f'IPU {ipu.ipu}':>12}  [{_bar(ipu)}] {100 * ipu.share:3.0f} % ({parts} MB){note}"


def _bar(ipu: Any) -> str:
    text: List[str] = []
    used = 0
    for name, letter in _PARTS:
        used += getattr(ipu, name)
        text += [letter] * (round(_WIDTH * used / ipu.available) - len(text))
    if ipu.share > 1:  # also if the bar is longer by less than a character
        return "".join(text[: _WIDTH - 1]) + "!"
    return "".join(text).ljust(_WIDTH, ".")
