"""The pipeline splits of a model whose replicas have several IPUs: checked, or found by balancing.

A split is the name of the module with which the next IPU begins; modules that are called later are on the same IPU, up
to the next split. Splits are found once, before any instance starts, with plain torch; `program` applies them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

from raypod.cli import nearest
from raypod.errors import ConfigError
from raypod.plan import user_code
from raypod.plan.config import Config

_SAMPLES = 2  # BatchNorm needs more than one
_ROUNDS = 5  # of time measurements


@dataclasses.dataclass(frozen=True)
class Unit:
    """A module that stays on one IPU, and its cost: parameters, or seconds of forward and backward."""

    name: str
    cost: float


class Inputs(NamedTuple):
    """The arguments of a network."""

    positional: Tuple[Any, ...]
    named: Dict[str, Any] = {}


class _NetworkCalled(Exception):
    """Ends a call of `training_outputs` at the call of the network."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__("the network was called")
        self.inputs = inputs


def find_splits(config: Config, task: Any) -> Optional[Tuple[str, ...]]:
    """Return the splits of a config's model; None for one IPU, or if the user's model has its own `BeginBlock`s.

    Raises:
        ConfigError: a split is not a module of the model, or the model has fewer modules than IPUs, or raises an
            exception.
    """
    training, stages = config.training, config.pod.ipus_per_replica
    is_user_model = task.user_code is not None
    if training.pipeline_splits:
        # A model of the user may import the SDK, which is available in instances only; a task was imported already.
        if not is_user_model or ":" in config.task.name:
            with user_code.reported(config.model_name):
                network = _network(task)
            check_splits(network, training.pipeline_splits)
        return training.pipeline_splits
    if stages == 1 or (is_user_model and training.pipeline_balance is None):
        return None
    find_units = units_by_time if training.pipeline_balance == "time" else units_by_parameters
    with user_code.reported(config.model_name):
        batch = task.example(_SAMPLES)
        units = find_units(_network(task), network_inputs(task, batch))
    return balanced_splits(units, stages)


def check_splits(network: nn.Module, splits: Sequence[str]) -> None:
    """Raise ConfigError unless the splits are different modules of the network."""
    names = [name for name, _ in network.named_modules() if name]
    for index, split in enumerate(splits):
        if split not in names:
            near = nearest(split, names, count=3) or _siblings(split, names)
            raise ConfigError(f"--pipeline-splits: the model has no module {split!r}; similar: {', '.join(near)}")
        if split in splits[:index]:
            raise ConfigError(f"--pipeline-splits: {split} occurs twice; a module can begin only one stage")


def balanced_splits(units: Sequence[Unit], stages: int) -> Tuple[str, ...]:
    """Return the units with which stages 1, 2, ... begin, minimizing the cost of the most expensive stage.

    Among equal divisions it minimizes the sum of the squared costs of the stages.

    Raises:
        ConfigError: there are fewer units than stages.
    """
    if len(units) < stages:
        raise ConfigError(
            f"--ipus-per-replica {stages}: the model has only {len(units)} modules to distribute over IPUs "
            f"({', '.join(unit.name for unit in units)})"
        )
    before = [0.0, *itertools.accumulate(unit.cost for unit in units)]
    largest, _ = _divide(before, stages, lambda value, cost: max(value, cost))
    _, cuts = _divide(before, stages, lambda value, cost: value + cost * cost if cost <= largest else math.inf)
    return tuple(units[cut].name for cut in cuts[1:])


def _divide(
    before: Sequence[float], stages: int, add: Callable[[float, float], float]
) -> Tuple[float, Tuple[int, ...]]:
    """Divide units into stages of at least one unit; return the smallest value and the first units of the stages.

    Args:
        before: the sum of the costs before each unit, and of all.
        add: the value of a division to which a stage of some cost is appended; does not decrease.
    """
    count = len(before) - 1
    best: Dict[int, Tuple[float, Tuple[int, ...]]] = {0: (0.0, ())}  # of the units before the key
    for stage in range(stages):
        found = {}
        for end in range(stage + 1, count - (stages - stage - 1) + 1):
            divisions = ((cut, value, cuts) for cut, (value, cuts) in best.items() if cut < end)
            found[end] = min((add(value, before[end] - before[cut]), (*cuts, cut)) for cut, value, cuts in divisions)
        best = found
    return best[count]


def units_by_parameters(network: nn.Module, inputs: Inputs) -> List[Unit]:
    """Return the units in the order of their calls, with their numbers of parameters."""
    return [Unit(name, float(_parameters(module))) for name, module in _called(network, inputs)]


def units_by_time(network: nn.Module, inputs: Inputs) -> List[Unit]:
    """Return the units in the order of their calls, with the seconds of their forward and backward on this host's CPU.

    The time is the minimum of several rounds. Times on an IPU differ.
    """
    called = _called(network, inputs)
    rounds = [_time_round(network, inputs, called) for _ in range(_ROUNDS)]
    return [Unit(name, min(times[name] for times in rounds)) for name, _ in called]


def _time_round(network: nn.Module, inputs: Inputs, called: List[Tuple[str, nn.Module]]) -> Dict[str, float]:
    """Return the seconds from the start of each unit to the start of the next one, forward plus backward."""
    marks: List[Tuple[str, float]] = []
    backward: List[Tuple[str, float]] = []

    def forward_mark(name: str) -> Any:
        def hook(module: nn.Module, inputs: Tuple[torch.Tensor, ...]) -> None:
            marks.append((name, time.perf_counter()))
            source = next((value for value in inputs if isinstance(value, torch.Tensor)), None)
            if source is not None and source.requires_grad:
                # Runs when this unit's backward ends, which is when the backward of the previous unit starts.
                source.register_hook(lambda grad: backward.append((name, time.perf_counter())))  # type: ignore[no-untyped-call]

        return hook

    hooks = [module.register_forward_pre_hook(forward_mark(name)) for name, module in called]
    try:
        outputs = network(*inputs.positional, **inputs.named)
        ended = time.perf_counter()
        sum(each.sum() for each in _tensors(outputs) if each.requires_grad).backward()  # type: ignore[union-attr]
        done = time.perf_counter()
    finally:
        for hook in hooks:
            hook.remove()
        network.zero_grad(set_to_none=True)
    seconds = dict.fromkeys((name for name, _ in called), 0.0)
    for (name, begin), end in zip(marks, [mark for _, mark in marks[1:]] + [ended]):
        seconds[name] += end - begin
    begin = ended
    for name, end in backward:
        seconds[name] += end - begin
        begin = end
    seconds[called[0][0]] += done - begin  # the network's input has no gradient, so this unit has no hook
    return seconds


def _called(network: nn.Module, inputs: Inputs) -> List[Tuple[str, nn.Module]]:
    """Return the units that have parameters and are called exactly once, in the order of their calls."""
    calls: List[str] = []

    def note(name: str) -> Any:
        return lambda module, inputs: calls.append(name)

    units = dict(_units(network))
    hooks = [module.register_forward_pre_hook(note(name)) for name, module in units.items()]
    try:
        with torch.no_grad():
            network(*inputs.positional, **inputs.named)
    finally:
        for hook in hooks:
            hook.remove()
    once = [name for name in calls if calls.count(name) == 1 and _parameters(units[name])]
    if not once:
        raise ConfigError("the model cannot be balanced over IPUs: none of its modules is called exactly once")
    return [(name, units[name]) for name in once]


def _units(module: nn.Module, prefix: str = "") -> Iterator[Tuple[str, nn.Module]]:
    """Yield the modules to distribute over IPUs.

    Sequences, and modules with a sequence of more than 90% of their parameters, are replaced by their children.
    """
    for name, child in module.named_children():
        if any(child.named_children()) and any(
            10 * _parameters(each) > 9 * _parameters(child) for each in _sequences(child)
        ):
            yield from _units(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _sequences(module: nn.Module) -> List[nn.Module]:
    """Return the module and its children, as far as they are sequences."""
    return [each for each in (module, *module.children()) if isinstance(each, (nn.Sequential, nn.ModuleList))]


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _siblings(split: str, names: Sequence[str]) -> List[str]:
    """Return up to 8 modules with the parent of `split`, or of the top level if that parent does not exist."""
    parent = split.rpartition(".")[0]
    beside = [name for name in names if name.rpartition(".")[0] == (parent if parent in names else "")]
    return beside[:8]


def _network(task: Any) -> nn.Module:
    network: nn.Module = task.network(task.example(_SAMPLES))
    return network.train()


def network_inputs(task: Any, batch: Sequence[torch.Tensor]) -> Inputs:
    """Return the inputs with which a task calls its network, in float32. ConfigError if it does not call it."""

    def capture(*inputs: Any, **named: Any) -> Any:
        raise _NetworkCalled(Inputs(tuple(map(_float, inputs)), {name: _float(each) for name, each in named.items()}))

    try:
        if task.names is None:
            task.training_outputs(capture, *batch)
        else:
            task.training_outputs(capture, **dict(zip(task.names, batch)))
    except _NetworkCalled as call:
        return call.inputs
    raise ConfigError(f"{type(task).__name__}.training_outputs does not call the network")


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _tensors(outputs: Any) -> List[torch.Tensor]:
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
