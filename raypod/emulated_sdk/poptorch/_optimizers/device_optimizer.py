"""The weight update on the device (contract 2.5, 4): torch's own optimizers on the device's weights.

The parameters are dealt out to as many parts as there are replica threads, so that the threads share an update's work.
An update treats each parameter by itself, so the parts do not show in the results.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, Dict, List, Sequence, cast

import torch

from poptorch._errors import Error

from . import eager
from .hyperparameters import Hyperparameters
from .tf_rmsprop import TfRMSprop

_Group = Dict[str, torch.nn.Parameter]


class DeviceOptimizer:
    """Updates the device's parameters.

    `groups`: for every parameter group of the host optimizer the device's parameters by name.
    """

    def __init__(self, hyperparameters: Hyperparameters, groups: Sequence[_Group], parts: int) -> None:
        self._hyperparameters = hyperparameters
        self.parameters = {name: parameter for group in groups for name, parameter in group.items()}
        self._parts = [
            _construct(hyperparameters, [{name: group[name] for name in part if name in group} for group in groups])
            for part in _deal(self.parameters, parts)
        ]

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The values in force."""
        return self._hyperparameters

    @hyperparameters.setter
    def hyperparameters(self, values: Hyperparameters) -> None:
        self._hyperparameters = values
        for part in self._parts:
            for group, new in zip(part.param_groups, values.groups):
                group.update(new)

    def scale(self, part: int, factor: float) -> None:
        """Multiply the gradients of one part."""
        if factor != 1.0:
            for gradient in self._gradients(part):
                gradient.mul_(factor)

    def clip(self) -> None:
        """Bound the global norm of all gradients, by torch's own rule."""
        bound = self._hyperparameters.max_grad_norm
        if bound != float("inf"):
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), bound)

    def step(self, part: int) -> None:
        """Update the parameters of one part."""
        eager.step(self._parts[part])

    def state(self) -> Dict[str, Dict[str, torch.Tensor]]:
        """A copy of the state, by parameter name and torch's name of the quantity."""
        held = {parameter: values for part in self._parts for parameter, values in part.state.items()}
        return {
            name: copy.deepcopy({key: value for key, value in held[parameter].items() if value is not None})
            for name, parameter in self.parameters.items()
            if parameter in held
        }

    def load_state(self, state: Dict[str, Dict[str, torch.Tensor]]) -> None:
        """Take over a `state()`. Error when it names parameters that are not here."""
        unknown = sorted(set(state) - set(self.parameters))
        if unknown:
            raise Error(f"The optimizer state has unknown parameters: {', '.join(unknown)}")
        for part in self._parts:
            part.state.clear()
            own = {id(parameter) for group in part.param_groups for parameter in group["params"]}
            for name, values in state.items():
                if id(self.parameters[name]) in own:
                    part.state[self.parameters[name]] = copy.deepcopy(values)

    def _gradients(self, part: int) -> List[torch.Tensor]:
        parameters = [parameter for group in self._parts[part].param_groups for parameter in group["params"]]
        return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _construct(hyperparameters: Hyperparameters, groups: List[_Group]) -> torch.optim.Optimizer:
    with_values: List[Dict[str, Any]] = [
        {"params": list(group.values()), **values} for group, values in zip(groups, hyperparameters.groups)
    ]
    defaults = dict(hyperparameters.groups[0])
    if hyperparameters.uses_tf_variant:
        return TfRMSprop(with_values, defaults)
    algorithm: Any = hyperparameters.algorithm
    return cast(torch.optim.Optimizer, algorithm(with_values, **defaults, **_fastest_kernel(algorithm)))


def _fastest_kernel(algorithm: Any) -> Dict[str, bool]:
    """One fused pass over the memory, where this torch has it for CPU tensors."""
    if "fused" in inspect.signature(algorithm).parameters:
        try:
            algorithm([torch.nn.Parameter(torch.zeros(1))], lr=0.1, fused=True)
        except RuntimeError:
            return {"foreach": False}
        return {"fused": True}
    return {"foreach": False}


def _deal(parameters: _Group, parts: int) -> List[List[str]]:
    """The names of the parameters in parts of about equal size, the largest dealt first."""
    dealt: List[List[str]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    for name in sorted(parameters, key=lambda name: -parameters[name].numel()):
        smallest = sizes.index(min(sizes))
        dealt[smallest].append(name)
        sizes[smallest] += parameters[name].numel()
    return dealt
