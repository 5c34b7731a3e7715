"""The pipeline splits of a model whose replicas have several IPUs: checked, or found by balancing.

A split is the name of the module with which the next IPU begins; modules that are called later are on the same IPU, up
to the next split. Modules that share a parameter are on one IPU, to which the pipeline returns. Splits are found once,
before any instance starts, with plain torch; `program` applies them.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections import Counter
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from torch import nn

from raypod.errors import ConfigError
from raypod.plan import user_code
from raypod.plan.config import Config
from raypod.plan.values import Stage, splits_of, stages_of
from raypod.system.command_line import nearest

_SAMPLES = 2  # of larger micro-batches: BatchNorm needs more than one
_ROUNDS = 5  # of time measurements


class Unit(NamedTuple):
    """A module that stays on one IPU, and its cost: parameters, or seconds of forward and backward."""

    name: str
    cost: float


class Inputs(NamedTuple):
    """The arguments of a network."""

    positional: Tuple[Any, ...]
    named: Dict[str, Any] = {}


class Tied(NamedTuple):
    """A unit that has a parameter of an earlier one, `home`."""

    module: str
    home: str


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
    training, ipus = config.training, config.pod.ipus_per_replica
    is_user_model, is_chosen = task.user_code is not None, training.pipeline_balance or training.layers_per_ipu
    if training.pipeline_splits:
        # A model of the user may import the SDK, which is available in instances only; a task was imported already.
        if not is_user_model or ":" in config.task.name:
            with user_code.reported(config.model_name):
                network = network_of(task)
                check_splits(network, stages_of(training.pipeline_splits))
                if has_shared_parameters(network):
                    check_shared(network, inputs_of(task), stages_of(training.pipeline_splits))
        return training.pipeline_splits
    if ipus == 1 or (is_user_model and not is_chosen):
        return None
    with user_code.reported(config.model_name):
        network, inputs = network_of(task), inputs_of(task)
        if training.layers_per_ipu:
            return splits_of(layer_stages(network, inputs, training.layers_per_ipu, ipus))
        find_units = units_by_time if training.pipeline_balance == "time" else units_by_parameters
        units, tied = find_units(network, inputs), tied_unit(called_units(network, inputs))
    if tied is None:
        return balanced_splits(units, ipus)
    begins = balanced_splits([unit for unit in units if unit.name != tied.module], ipus)
    stages = [Stage(name, ipu) for ipu, name in enumerate(begins, start=1)]
    return splits_of(_with_tied(stages, [unit.name for unit in units], tied))


def check_splits(network: nn.Module, stages: Sequence[Stage]) -> None:
    """Raise ConfigError unless the stages begin with modules of the network."""
    names = [name for name, _ in network.named_modules() if name]
    for split, _ in stages:
        if split not in names:
            near = nearest(split, names, count=3) or _siblings(split, names)
            raise ConfigError(f"--pipeline-splits: the model has no module {split!r}; similar: {', '.join(near)}")


def has_shared_parameters(network: nn.Module) -> bool:
    """Return whether several modules have the same parameter."""
    named = list(network.named_parameters(remove_duplicate=False))
    return len(named) > len({id(parameter) for _, parameter in named})


def check_shared(network: nn.Module, inputs: Inputs, stages: Sequence[Stage]) -> None:
    """Raise ConfigError for a parameter that modules on different IPUs have."""
    homes: Dict[int, Tuple[str, int]] = {}
    begins, ipu, modules = dict(stages), 0, dict(network.named_modules())
    for name in _calls(network, inputs):
        ipu = begins.get(name, ipu)
        for parameter in modules[name].parameters(recurse=False):
            first, home = homes.setdefault(id(parameter), (name, ipu))
            if ipu != home:
                raise ConfigError(
                    f"--pipeline-splits: {name} on IPU {ipu} has a parameter of {first} on IPU {home}, and "
                    f"an IPU cannot use those of another: let {name}={home} begin a stage"
                )


def tied_unit(called: Sequence[Tuple[str, nn.Module]]) -> Optional[Tied]:
    """Return the last unit if it shares a parameter with an earlier one; None if no units share any.

    Raises:
        ConfigError: another unit than the last does.
    """
    homes: Dict[int, str] = {}
    tied = [
        Tied(name, homes[id(parameter)])
        for name, module in called
        for parameter in module.parameters()
        if homes.setdefault(id(parameter), name) != name
    ]
    for unit, home in tied:
        if unit != called[-1][0]:
            raise ConfigError(
                f"--ipus-per-replica: {unit} shares a parameter with {home}, and others follow it: choose the stages "
                "with --pipeline-splits, as MODULE=IPU"
            )
    return tied[0] if tied else None


def _with_tied(stages: List[Stage], units: Sequence[str], tied: Tied) -> List[Stage]:
    """Return the stages and one on the IPU of the unit whose parameter the last unit has."""
    begins, ipu = dict(stages), 0
    for unit in units[: units.index(tied.home) + 1]:
        ipu = begins.get(unit, ipu)
    return stages if ipu == (stages[-1].ipu if stages else 0) else [*stages, Stage(tied.module, ipu)]


def layer_stages(network: nn.Module, inputs: Inputs, counts: Sequence[int], ipus: int) -> List[Stage]:
    """Return the stages of a model with so many layers on each IPU: its longest sequence of modules of one class.

    The modules before the first layer are on IPU 0, those after the last one on the last IPU.

    Raises:
        ConfigError: the model has no such sequence, or another number of layers.
    """
    called = called_units(network, inputs)
    names = [name for name, _ in called]
    layers = _layers(network, names)
    counts = tuple(counts) * ipus if len(counts) == 1 else tuple(counts)
    flag = f"--layers-per-ipu {','.join(map(str, counts))}"
    if sum(counts) != len(layers):
        raise ConfigError(
            f"{flag} has {sum(counts)} layers, and the model has {len(layers)}: {layers[0]} .. {layers[-1]}"
        )
    if 0 in counts[1:-1]:
        raise ConfigError(f"{flag}: only the first and the last IPU can be without layers")
    after = names[names.index(layers[-1]) + 1 :]
    first = [sum(counts[:ipu]) for ipu in range(ipus)]
    if first[-1] == len(layers) and not after:
        raise ConfigError(f"{flag}: no module follows the layers, so that the last IPU would be without any")
    stages = [Stage([*layers, *after[:1]][first[ipu]], ipu) for ipu in range(1, ipus)]
    tied = tied_unit(called)
    return stages if tied is None else _with_tied(stages, names, tied)


def _layers(network: nn.Module, called: Sequence[str]) -> List[str]:
    """Return the names of the layers of a model. ConfigError if it has none."""
    found: List[str] = []
    for name, module in network.named_modules():
        children = list(module.children()) if isinstance(module, (nn.Sequential, nn.ModuleList)) else []
        names = [f"{name}.{child}" if name else child for child, _ in module.named_children()]
        if len({type(child) for child in children}) == 1 and len(names) > len(found) and set(names) <= set(called):
            found = names
    if len(found) < 2:
        raise ConfigError("--layers-per-ipu: the model has no sequence of layers; use --pipeline-splits")
    return found


def balanced_splits(units: Sequence[Unit], stages: int) -> Tuple[str, ...]:
    """Return the units with which stages 1, 2, ... begin, minimizing the cost of the most expensive stage.

    Among equal divisions it minimizes the sum of the squared costs of the stages.

    Raises:
        ConfigError: there are fewer units than stages.
    """
    before = [0.0, *itertools.accumulate(unit.cost for unit in units)]
    names = [unit.name for unit in units]
    cuts = divide(names, stages, lambda stage, first, end: before[end] - before[first])
    return tuple(names[cut] for cut in cuts[1:])


def divide(names: Sequence[str], stages: int, cost: Callable[[int, int, int], float]) -> Tuple[int, ...]:
    """Return the indices of the first units of all stages, as `balanced_splits`.

    Args:
        names: of the units.
        stages: number of stages.
        cost: of the units from `first` to `end`, exclusive, in a stage: `cost(stage, first, end)`.
    """
    if len(names) < stages:
        raise ConfigError(
            f"--ipus-per-replica {stages}: the model has only {len(names)} modules to distribute over IPUs "
            f"({', '.join(names)})"
        )
    largest, _ = _divide(len(names), stages, cost, max)
    _, cuts = _divide(
        len(names), stages, cost, lambda value, cost: value + cost * cost if cost <= largest else math.inf
    )
    return cuts


def _divide(
    count: int, stages: int, cost: Callable[[int, int, int], float], add: Callable[[float, float], float]
) -> Tuple[float, Tuple[int, ...]]:
    """Divide units into stages of at least one unit; return the smallest value and the first units of the stages.

    Args:
        count: number of units.
        stages: number of stages.
        cost: as of `divide`.
        add: the value of a division to which a stage of some cost is appended; does not decrease.
    """
    best: Dict[int, Tuple[float, Tuple[int, ...]]] = {0: (0.0, ())}  # of the units before the key
    for stage in range(stages):
        found = {}
        for end in range(stage + 1, count - (stages - stage - 1) + 1):
            divisions = ((cut, value, cuts) for cut, (value, cuts) in best.items() if cut < end)
            found[end] = min((add(value, cost(stage, cut, end)), (*cuts, cut)) for cut, value, cuts in divisions)
        best = found
    return best[count]


def units_by_parameters(network: nn.Module, inputs: Inputs) -> List[Unit]:
    """Return the units in the order of their calls, with their numbers of parameters."""
    return [Unit(name, float(_parameters(module))) for name, module in called_units(network, inputs)]


def units_by_time(network: nn.Module, inputs: Inputs) -> List[Unit]:
    """Return the units in the order of their calls, with the seconds of their forward and backward on this host's CPU.

    The time is the minimum of several rounds. Times on an IPU differ.
    """
    called = called_units(network, inputs)
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


def called_units(network: nn.Module, inputs: Inputs) -> List[Tuple[str, nn.Module]]:
    """Return the units that have parameters and are called exactly once, in the order of their calls."""
    units = dict(_units(network, _layer_list(network)))
    calls = Counter(_calls(network, inputs))  # in the order of the first calls
    once = [name for name, count in calls.items() if name in units and count == 1 and _parameters(units[name])]
    if not once:
        raise ConfigError("the model cannot be balanced over IPUs: none of its modules is called exactly once")
    return [(name, units[name]) for name in once]


def _calls(network: nn.Module, inputs: Inputs) -> List[str]:
    """Return the names of the modules that a forward calls, in the order of their calls.

    The forward is that of a copy with tensors on the device `meta`, which computes shapes only: on a CPU that of GPT-2
    takes many seconds. A network whose copy raises an exception, because it reads values for example, is called itself.
    """
    tensors = [*network.parameters(), *network.buffers(), *inputs.positional, *inputs.named.values()]
    shapes = {id(each): _without_values(each) for each in tensors if isinstance(each, torch.Tensor)}
    try:
        return _forward_calls(*copy.deepcopy((network, inputs), shapes))
    except Exception:  # noqa: BLE001  # user code; the network raises it again unless it needs values
        return _forward_calls(network, inputs)


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach().to("meta")
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def _forward_calls(network: nn.Module, inputs: Inputs) -> List[str]:
    calls: List[str] = []

    def note(name: str) -> Any:
        return lambda module, inputs: calls.append(name)

    hooks = [module.register_forward_pre_hook(note(name)) for name, module in network.named_modules()]
    try:
        with torch.no_grad():
            network(*inputs.positional, **inputs.named)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _units(
    module: nn.Module, layers: str, prefix: str = "", seen: Optional[Set[int]] = None
) -> Iterator[Tuple[str, nn.Module]]:
    """Yield the modules to distribute over IPUs, each once, also if it has several names.

    Sequences, modules with a sequence of more than 90% of their parameters, and those that contain the list `layers`,
    are replaced by their children, but the layers in it are not.
    """
    seen = set() if seen is None else seen
    for own, child in module.named_children():
        name = f"{prefix}{own}"
        sequences = (each for each in (child, *child.children()) if isinstance(each, (nn.Sequential, nn.ModuleList)))
        is_divided = any(10 * _parameters(each) > 9 * _parameters(child) for each in sequences)
        is_divided = f"{layers}.".startswith(f"{name}.") or (is_divided and prefix != f"{layers}.")
        if any(child.named_children()) and is_divided:
            yield from _units(child, layers, f"{name}.", seen)
        elif id(child) not in seen:
            seen.add(id(child))
            yield name, child


def _layer_list(network: nn.Module) -> str:
    """Return the name of the longest `nn.ModuleList` of modules of one class, as a transformer's; "" without one."""
    found, longest = "", 1
    for name, module in network.named_modules():
        children = list(module.children()) if isinstance(module, nn.ModuleList) else []
        if len({type(child) for child in children}) == 1 and len(children) > longest:
            found, longest = name, len(children)
    return found


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _siblings(split: str, names: Sequence[str]) -> List[str]:
    """Return up to 8 modules with the parent of `split`, or of the top level if that parent does not exist."""
    parent = split.rpartition(".")[0]
    beside = [name for name in names if name.rpartition(".")[0] == (parent if parent in names else "")]
    return beside[:8]


def network_of(task: Any) -> nn.Module:
    """Return the network of a task, in training mode."""
    network: nn.Module = task.network(_example(task))
    return network.train()


def _example(task: Any) -> Any:
    return task.example(min(_SAMPLES, task.config.training.batch_size))


def inputs_of(task: Any) -> Inputs:
    """Return the inputs of its network for a small micro-batch; see `network_inputs`."""
    return network_inputs(task, _example(task))


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
