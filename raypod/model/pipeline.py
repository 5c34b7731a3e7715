"""Where a model is cut when a replica has several IPUs: by the names of modules, or balanced by itself.

A split is the name of a module with which the next IPU begins; everything that is called after it lies there too, up to
the next split. Plain torch without an SDK: the cuts are found before anything starts, once for all instances, and
`steps.py` puts them into the model.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.nn import functional

from raypod import datasets
from raypod.cli import nearest
from raypod.errors import ConfigError
from raypod.model import networks
from raypod.plan.config import Config

_SAMPLES = 2  # BatchNorm wants more than one
_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Unit:
    """A module that is not cut itself, and what it costs: parameters, or seconds forward and backward."""

    name: str
    cost: float


def find_splits(config: Config) -> Optional[Tuple[str, ...]]:
    """The splits of a config's model; None where the model lies on one IPU, or divides itself by its own blocks.

    Raises:
        ConfigError: a split that is no module of the model, or fewer modules than IPUs.
    """
    training, stages = config.training, config.pod.ipus_per_replica
    is_own = ":" in training.model
    if training.pipeline_splits:
        # A module of your own may import the SDK, which only an instance has.
        if not is_own:
            check_splits(_network(config), training.pipeline_splits)
        return training.pipeline_splits
    if stages == 1 or (is_own and training.pipeline_balance is None):
        return None
    network = _network(config)
    measured = training.pipeline_balance == "time"
    units = timed_units(network, _images(config)) if measured else counted_units(network, _images(config))
    return balanced_splits(units, stages)


def check_splits(network: nn.Module, splits: Sequence[str]) -> None:
    """Raise ConfigError unless every split is another module of the network."""
    names = [name for name, _ in network.named_modules() if name]
    for index, split in enumerate(splits):
        if split not in names:
            near = nearest(split, names, count=3) or _siblings(split, names)
            raise ConfigError(f"--pipeline-splits: the model has no module {split!r}; near it are {', '.join(near)}")
        if split in splits[:index]:
            raise ConfigError(f"--pipeline-splits names {split} twice; a module begins one stage")


def balanced_splits(units: Sequence[Unit], stages: int) -> Tuple[str, ...]:
    """The units with which stages 1, 2, ... begin, so that the most expensive stage is as cheap as can be.

    Of several such divisions it is the one whose costs have the least sum of squares, the most even one.

    Raises:
        ConfigError: there are fewer units than stages.
    """
    if len(units) < stages:
        raise ConfigError(
            f"--ipus-per-replica {stages}: the model has {len(units)} modules that can be divided between IPUs "
            f"({', '.join(unit.name for unit in units)})"
        )
    before = [0.0, *itertools.accumulate(unit.cost for unit in units)]
    # best[end]: (largest cost, sum of squares, cuts) of the units before `end` in as many stages as rounds were done.
    best: Dict[int, Tuple[float, float, Tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        found = {}
        for end in range(stage + 1, len(units) - (stages - stage - 1) + 1):
            divisions = []
            for cut, (largest, squares, cuts) in best.items():
                if cut < end:
                    cost = before[end] - before[cut]
                    divisions.append((max(largest, cost), squares + cost * cost, (*cuts, cut)))
            found[end] = min(divisions)
        best = found
    _, _, cuts = best[len(units)]
    return tuple(units[cut].name for cut in cuts[1:])


def counted_units(network: nn.Module, images: torch.Tensor) -> List[Unit]:
    """Units in the order in which they are called, by their parameters."""
    called = _called(network, images)
    return [Unit(name, float(_parameters(part))) for name, part in called]


def timed_units(network: nn.Module, images: torch.Tensor) -> List[Unit]:
    """Units in the order in which they are called, by the seconds of their forward and backward on this host.

    The quickest of several rounds counts. It is the time of this CPU, not of an IPU.
    """
    called = _called(network, images)
    rounds = [_time_round(network, images, called) for _ in range(_ROUNDS)]
    return [Unit(name, min(times[name] for times in rounds)) for name, _ in called]


def _time_round(network: nn.Module, images: torch.Tensor, called: List[Tuple[str, nn.Module]]) -> Dict[str, float]:
    """Seconds from the beginning of each unit to that of the next one, forward and backward."""
    marks: List[Tuple[str, float]] = []
    backward: List[Tuple[str, float]] = []

    def forward_mark(name: str) -> Any:
        def hook(module: nn.Module, inputs: Tuple[torch.Tensor, ...]) -> None:
            marks.append((name, time.perf_counter()))
            source = next((value for value in inputs if isinstance(value, torch.Tensor)), None)
            if source is not None and source.requires_grad:
                # Called when the backward of this unit is done, which is when that of the one before begins.
                source.register_hook(lambda grad: backward.append((name, time.perf_counter())))  # type: ignore[no-untyped-call]

        return hook

    hooks = [part.register_forward_pre_hook(forward_mark(name)) for name, part in called]
    try:
        logits = network(images)
        ended = time.perf_counter()
        functional.cross_entropy(logits, torch.zeros(len(images), dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
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
    seconds[called[0][0]] += done - begin  # its input has no gradient, and so no hook
    return seconds


def _called(network: nn.Module, images: torch.Tensor) -> List[Tuple[str, nn.Module]]:
    """The units that have parameters and are called exactly once, in the order of their calls."""
    calls: List[str] = []

    def note(name: str) -> Any:
        return lambda module, inputs: calls.append(name)

    units = dict(_units(network))
    hooks = [part.register_forward_pre_hook(note(name)) for name, part in units.items()]
    try:
        with torch.no_grad():
            network(images)
    finally:
        for hook in hooks:
            hook.remove()
    once = [name for name in calls if calls.count(name) == 1 and _parameters(units[name])]
    if not once:
        raise ConfigError("the model cannot be divided between IPUs by itself: none of its modules is called just once")
    return [(name, units[name]) for name in once]


def _units(module: nn.Module, prefix: str = "") -> Iterator[Tuple[str, nn.Module]]:
    """The modules to divide between IPUs: sequences are opened, and what consists of hardly more than one."""
    for name, part in module.named_children():
        if any(part.named_children()) and any(
            10 * _parameters(each) > 9 * _parameters(part) for each in _sequences(part)
        ):
            yield from _units(part, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", part


def _sequences(module: nn.Module) -> List[nn.Module]:
    """The module itself and its children, as far as they are sequences."""
    return [each for each in (module, *module.children()) if isinstance(each, (nn.Sequential, nn.ModuleList))]


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _siblings(split: str, names: Sequence[str]) -> List[str]:
    """Modules beside a name that resembles none: those of its parent, or of the model."""
    parent = split.rpartition(".")[0]
    beside = [name for name in names if name.rpartition(".")[0] == (parent if parent in names else "")]
    return beside[:8]


def _network(config: Config) -> nn.Module:
    shape = datasets.image_shape(config)
    return networks.build_model(config, shape.channels, shape.side, shape.classes).train()


def _images(config: Config) -> torch.Tensor:
    shape = datasets.image_shape(config)
    return torch.zeros(_SAMPLES, shape.channels, shape.side, shape.side)
