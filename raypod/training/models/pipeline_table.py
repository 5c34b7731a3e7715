"""A pipeline as a table: the modules of each IPU, and what every IPU computes in every cycle of an update.

The data comes from the emulated SDK, which compiles the model with the run's splits and execution strategy. A process
that has called `inspect_pipeline` cannot use the real SDK any more.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Tuple

from raypod.plan import user_code
from raypod.plan.plan import Plan
from raypod.plan.sections import SNAPSHOTS_KEPT
from raypod.system import sdk
from raypod.system.sdk import activation, telemetry
from raypod.training.models.schedule import StageCost, compare_strategies

_SAMPLES = 2  # of larger micro-batches: BatchNorm needs more than one
_COLUMNS = 22  # cycles shown at most
_FACTORS = (1, 2, 4, 8)  # by which the gradient accumulation is multiplied for comparison
_MOST_COMPARED = 1024  # micro-batches; IPUs are hardly idle with more
_SECTIONS = {"ramp-up": "<", "main": "=", "ramp-down": ">", "update": "U"}


class Stage(NamedTuple):
    """One forward stage; sizes are per replica."""

    ipu: int
    modules: Tuple[str, ...]
    parameters: int
    weight_bytes: int  # parameters and buffers
    update_bytes: int  # accumulated gradients and optimizer states
    share_of_work: float  # of the forward operations


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The stages of a model in execution order, and their schedules.

    `schedules[accumulation]["pipelined" or "sharded"]` is the emulated SDK's; the first accumulation is the plan's.
    `memory` is the emulated SDK's estimate for each IPU of a replica.
    """

    stages: Tuple[Stage, ...]
    schedules: Mapping[int, Mapping[str, Any]]
    memory: Tuple[Any, ...]


def inspect_pipeline(plan: Plan, task: Any) -> Pipeline:
    """Compile the plan's model for the emulated device and return its stages and schedules.

    Raises:
        ConfigError: the model cannot be built or compiled; in strict mode also if an IPU rejects it.
    """
    sdk.select("emulated")
    from raypod.training.models import optimizers

    model, scale = compiled(plan, task), micro_batch_factor(plan)
    is_strict = activation.is_strict()  # otherwise the table says that the model does not fit
    with user_code.reported(plan.config.model_name):
        memory = model.emulatedMemory(scale, plan.geometry.local_replicas, is_checked=is_strict)
    placement, optimizer_bytes = model.emulatedPlacement(), optimizers.optimizer_bytes(plan.config.training)
    forwards = [scale * max(each.forward_operations, 1) for each in placement.stages]
    costs = [  # in operations: the backward is twice the forward, the update one per parameter element
        StageCost(forward, 2 * forward, float(each.parameter_elements), each.ipu)
        for forward, each in zip(forwards, placement.stages)
    ]
    accumulation = plan.geometry.gradient_accumulation
    compared = [accumulation * each for each in _FACTORS if each == 1 or accumulation * each <= _MOST_COMPARED]
    schedules = {each: compare_strategies(costs, each) for each in compared}
    return Pipeline(_stages(placement.stages, optimizer_bytes), schedules, memory)


def _samples(plan: Plan) -> int:
    """Return the micro-batch that is compiled; no larger than the plan's, which an IPU's memory may only just hold."""
    return min(_SAMPLES, plan.config.training.batch_size)


def snapshot_bytes(plan: Plan, pipeline: Pipeline) -> int:
    """Return the memory that the snapshots of `--snapshot-every` take on each host, in bytes; an estimate."""
    from raypod.training.models import optimizers

    training = plan.config.training
    copies = 1 if training.ema is None else 2
    states = sum(each.parameters for each in pipeline.stages) * optimizers.optimizer_state_bytes(training)
    return SNAPSHOTS_KEPT * (copies * sum(each.weight_bytes for each in pipeline.stages) + states)


def describe_pipeline(pipeline: Pipeline) -> Dict[str, Any]:
    """Return the pipeline as JSON data."""
    accumulation, compared = next(iter(pipeline.schedules.items()))
    schedules = {
        name: {"accumulation": accumulation, "cycles": schedule.cycles, "idle_share": schedule.idle_share}
        for name, schedule in compared.items()
    }
    return {"stages": [stage._asdict() for stage in pipeline.stages], "schedules": schedules}


def render_pipeline(pipeline: Pipeline, execution: str) -> str:
    """Return the stages as a table, and the cycles of an update: first for the plan's execution strategy."""
    accumulation, schedules = next(iter(pipeline.schedules.items()))
    order = sorted(schedules, key=lambda name: name != execution)
    lines = _stage_lines(pipeline.stages)
    for name in order:
        lines += ["", *_schedule_lines(schedules[name], accumulation, schedules[order[0]])]
    return "\n".join([*lines, "", *_accumulation_lines(pipeline.schedules, order)])


def micro_batch_factor(plan: Plan) -> float:
    """Return the size of the plan's micro-batch, relative to that of `compiled`."""
    return plan.config.training.batch_size / _samples(plan)


def compiled(plan: Plan, task: Any) -> Any:
    """Return the training model of one replica, compiled for a small micro-batch. ConfigError as `inspect_pipeline`."""
    import poptorch
    import torch

    from raypod.training.models import optimizers, program

    config = plan.config
    options = poptorch.Options()
    options.Training.gradientAccumulation(plan.geometry.gradient_accumulation)
    options.setExecutionStrategy(program.execution_strategy(plan))
    options.showCompilationProgressBar(False)
    program.make_calls(options, config)
    samples = _samples(plan) * plan.geometry.gradient_accumulation
    with user_code.reported(config.model_name), telemetry.inspection():
        batch = task.example(samples)
        network = program.finish_network(plan, task.network(batch))
        step = program.TrainingStep(task, plan.task.metrics, network, torch.nn.Identity()).train()
        groups = task.parameter_groups(network, config.training.weight_decay)
        model = poptorch.trainingModel(step, options, optimizers.build_optimizer(config, groups))
        model.compile(*batch)
    return model


def _stages(found: Sequence[Any], optimizer_bytes: int) -> Tuple[Stage, ...]:
    prefix, operations = "network.", max(1, sum(each.forward_operations for each in found))
    return tuple(
        Stage(
            ipu=each.ipu,
            modules=tuple(name[len(prefix) :] for name in each.modules if name.startswith(prefix)),
            parameters=each.parameter_elements,
            weight_bytes=each.parameter_bytes + each.buffer_bytes,
            update_bytes=each.parameter_elements * optimizer_bytes,
            share_of_work=each.forward_operations / operations,
        )
        for each in found
    )


def _stage_lines(stages: Sequence[Stage]) -> List[str]:
    lines = [f"{'IPU':>12}  {'modules':<44}{'parameters':>12}{'weights':>11}{'grads, states':>15}{'work':>7}"]
    for stage in stages:
        modules = " .. ".join(dict.fromkeys((stage.modules[0], stage.modules[-1]))) if stage.modules else "-"
        weights, update = f"{stage.weight_bytes / 1e6:.2f} MB", f"{stage.update_bytes / 1e6:.2f} MB"
        lines.append(
            f"{stage.ipu:>12}  {modules:<44}{stage.parameters:>12,}{weights:>11}{update:>15}"
            f"{100 * stage.share_of_work:>5.0f} %"
        )
    lines.append(f"{'':>12}  per replica, without activations")
    return [*lines, f"{'':>12}  below: columns are cycles (< ramp-up, = main, > ramp-down), numbers micro-batches"]


def _schedule_lines(schedule: Any, accumulation: int, chosen: Any) -> List[str]:
    counts = {name: schedule.sections.count(name) for name in _SECTIONS}
    ramps = f", ramp-up {counts['ramp-up']} and ramp-down {counts['ramp-down']}" if counts["ramp-up"] else ""
    summary = f"{schedule.cycles} cycles for {accumulation} micro-batches (main part {counts['main']}{ramps}, update 1)"
    longer = f", {schedule.time / chosen.time:.2f} x the time" if schedule is not chosen else ""
    columns = list(range(schedule.cycles))
    if len(columns) > _COLUMNS:
        columns = columns[: _COLUMNS // 2] + [-1] + columns[-(_COLUMNS // 2) :]
    width = max(4, len(str(accumulation - 1)) + 1)  # of a column: its number, and a space before it
    marks = ["..." if cycle < 0 else _SECTIONS[schedule.sections[cycle]] for cycle in columns]
    lines = [
        f"{schedule.name:>12}  {summary}; IPUs idle {100 * schedule.idle_share:.0f} %{longer}",
        f"{'':>12}  {'':<18}" + "".join(f"{mark:>{width}}" for mark in marks),
    ]
    work = {(cell.cycle, cell.stage, cell.what): cell for cell in schedule.cells}
    for stage, cost in enumerate(schedule.stages):
        for what in ("forward", "backward"):
            cells = [_cell(work, cycle, stage, what) for cycle in columns]
            label = f"IPU {cost.ipu} " if what == "forward" else ""
            lines.append(f"{'':>12}  {label:<8}{what:<10}" + "".join(f"{cell:>{width}}" for cell in cells))
    return lines


def _cell(work: Mapping[Tuple[int, int, str], Any], cycle: int, stage: int, what: str) -> str:
    """Return the number of the micro-batch that a stage computes in a cycle."""
    if cycle < 0:
        return "..."
    if (cycle, stage, "update") in work:
        return "U"
    cell = work.get((cycle, stage, what))
    return "." if cell is None else str(cell.micro_batch)


def _accumulation_lines(schedules: Mapping[int, Mapping[str, Any]], order: Sequence[str]) -> List[str]:
    lines = [f"{'idle':>12}  {'accumulation':<18}" + "".join(f"{accumulation:>8}" for accumulation in schedules)]
    for name in order:
        shares = (f"{100 * each[name].idle_share:.1f} %" for each in schedules.values())
        lines.append(f"{'':>12}  {name:<18}" + "".join(f"{share:>8}" for share in shares))
    return lines
