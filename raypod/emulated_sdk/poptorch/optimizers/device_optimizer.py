"""The weight update on the device: torch's optimizers on the device's weights.

The parameters are split into one part per replica thread, and the threads update the parts in parallel. An update is
independent for each parameter, so the split does not affect results.
"""

from __future__ import annotations

import inspect
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from poptorch.errors import Error
from poptorch.optimizers.hyperparameters import Hyperparameters
from poptorch.optimizers.rules import OWN_GROUP_ATTRIBUTES, PerParameter, StateTensor, lamb, tf_rmsprop

_Group = Dict[str, torch.nn.Parameter]
_TO_MEMORY_ORDER, _FROM_MEMORY_ORDER = (0, 2, 3, 1), (0, 3, 1, 2)  # of a channels_last tensor
_UPDATE_FACTOR = "lossScaleUpdateFactor"


class DeviceOptimizer:
    """Updates the device's parameters.

    Args:
        groups: for each parameter group of the host optimizer, the device's parameters by name.
        parts: number of parts.
        replica_groups: the number of groups of replicas with their own values, for the parameters that have such.

    Raises:
        Error: `max_grad_norm` or LAMB with such parameters, as the emulation has no norms of one group.
    """

    def __init__(
        self,
        hyperparameters: Hyperparameters,
        groups: Sequence[_Group],
        parts: int,
        replica_groups: Optional[Mapping[str, int]] = None,
    ) -> None:
        self._replica_groups = replica_groups or {}
        has_norm = hyperparameters.algorithm == "LAMB" or hyperparameters.max_grad_norm != float("inf")
        if self._replica_groups and has_norm:
            raise Error(
                "replicaGrouping: the emulation supports neither LAMB nor max_grad_norm with grouped parameters"
            )
        self._hyperparameters = hyperparameters
        self.group_names = [list(group) for group in groups]
        self.parameters = {name: parameter for group in groups for name, parameter in group.items()}
        self._group_of = {name: index for index, group in enumerate(groups) for name in group}
        updated = {name: _in_memory_order(parameter) for name, parameter in self.parameters.items()}
        self._updated = updated
        self._parts = [
            _construct(hyperparameters, [{name: updated[name] for name in part if name in group} for group in groups])
            for part in _split(self.parameters, parts)
        ]
        self._names = {id(parameter): name for name, parameter in updated.items()}
        self._half_state = _half_state(hyperparameters)
        self.loss_scale_update_factor: Optional[float] = None  # of automatic loss scaling

    @property
    def loss_scaling(self) -> float:
        """Factor of the loss."""
        factor = self.loss_scale_update_factor
        return self._hyperparameters.loss_scaling * (1.0 if factor is None else factor)

    def update_loss_scale(self, factor: float) -> None:
        """Multiply the factor of automatic loss scaling."""
        self.loss_scale_update_factor = (self.loss_scale_update_factor or 1.0) * factor

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The present values."""
        return self._hyperparameters

    @hyperparameters.setter
    def hyperparameters(self, values: Hyperparameters) -> None:
        self._hyperparameters = values
        for part in self._parts:
            for group, new in zip(part.param_groups, values.groups):
                group.update(new)
            _complete_state(part)

    def scale(self, part: int, factor: float) -> None:
        """Multiply the gradients of one part by `factor`."""
        if factor != 1.0:
            for gradient in self._gradients(part):
                gradient.mul_(factor)

    def clip(self) -> None:
        """Clip the global norm of all gradients to `max_grad_norm`, by `torch.nn.utils.clip_grad_norm_`."""
        bound = self._hyperparameters.max_grad_norm
        if bound != float("inf"):
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), bound)

    def step(self, part: int) -> None:
        """Update the parameters of one part, and round its state that is stored in half."""
        for name, updated in self._of_part(part):
            own = self.parameters[name]
            if updated is not own:
                updated.grad = None if own.grad is None else own.grad.permute(_TO_MEMORY_ORDER)
        plain_step(self._parts[part])
        for name, updated in self._of_part(part):
            if updated is not self.parameters[name]:
                updated.grad = None
        if self._half_state:
            self._round_state(part)

    def state(self) -> Dict[str, torch.Tensor]:
        """Return a copy of the state: one tensor for each trained parameter and state tensor, by PopART's names.

        State tensors stored in half are half, and a velocity in half is scaled as on the device.
        """
        held = {self._names[id(parameter)]: part.state[parameter] for part in self._parts for parameter in part.state}
        found = {}
        for name in self.parameters:
            for stored in self._stored(name):
                value = held.get(name, {}).get(stored.key)
                value = self._initial(name, stored.key) if value is None else self._with_own_shape(name, value)
                if value is not None:
                    encoded = stored.encoded(value).expand(self._shape(name, stored.key))
                    found[stored.name] = encoded.clone(memory_format=torch.contiguous_format)
        if self.loss_scale_update_factor is not None:
            found[_UPDATE_FACTOR] = torch.tensor(self.loss_scale_update_factor)
        return found

    def _initial(self, name: str, key: str) -> Any:
        """Return a state tensor as it is before the first update; None if the parameter does not have it."""
        values, parameter = self._hyperparameters, self.parameters[name]
        has = {"momentum_buffer": values.has_momentum, "grad_avg": values.groups[0].get("centered", False)}
        if not parameter.requires_grad or not has.get(key, True):
            return None
        is_tensorflow = bool(values.whole.get("use_tf_variant"))
        if key == "step":
            return None if is_tensorflow else torch.zeros(())
        return torch.full_like(parameter.detach(), float(is_tensorflow and key == "square_avg"))

    def snapshot(self) -> List[Dict[Any, Dict[str, Any]]]:
        """Return a copy of the state in the emulation's representation, for `restore`."""
        return [
            {parameter: {key: _copied(value) for key, value in held.items()} for parameter, held in part.state.items()}
            for part in self._parts
        ]

    def restore(self, snapshot: List[Dict[Any, Dict[str, Any]]]) -> None:
        """Restore a `snapshot()`; the optimizer takes ownership of it."""
        for part, states in zip(self._parts, snapshot):
            part.state.clear()
            part.state.update(states)

    def load_state(self, state: Dict[str, torch.Tensor], saved_with: Hyperparameters) -> None:
        """Replace the state by a `state()`, in which missing tensors stay; Error if its tensors do not match.

        Args:
            saved_with: the values at the time of `state()`, which determine the scaling of the velocity.
        """
        places = {stored.name: (name, stored) for name in self.parameters for stored in self._stored(name, saved_with)}
        state = {**self.state(), **state}
        if self.loss_scale_update_factor is not None:
            self.loss_scale_update_factor = float(state.pop(_UPDATE_FACTOR))
        self._check_names(state, places)
        part_of = {id(p): part for part in self._parts for group in part.param_groups for p in group["params"]}
        for part in self._parts:
            part.state.clear()
        for key, tensor in state.items():
            name, stored = places[key]
            is_step = stored.key == "step" and tensor.dim() == 1
            parameter, value = self._updated[name], stored.decoded(tensor[0] if is_step else tensor)
            if value.dim():
                if parameter is not self.parameters[name]:
                    value = value.permute(_TO_MEMORY_ORDER)
                # With the strides of the parameter, as fused kernels require.
                value = torch.empty_like(parameter, requires_grad=False).copy_(value)
            part_of[id(parameter)].state[parameter][stored.key] = value
        for part in self._parts:
            _complete_state(part)

    def _check_names(self, state: Dict[str, torch.Tensor], places: Dict[str, Tuple[str, _Stored]]) -> None:
        unknown = sorted(set(state) - set(places))
        if unknown:
            raise Error(f"The optimizer state has unknown tensors: {', '.join(unknown[:4])}")
        for key, tensor in state.items():
            name, stored = places[key]
            expected = self._shape(name, stored.key)
            if tensor.shape != expected:
                raise Error(f"{key} of the optimizer state has shape {list(tensor.shape)}, expected {list(expected)}")

    def _shape(self, name: str, key: str) -> torch.Size:
        """Return the shape of a state tensor."""
        if key != "step":
            return self.parameters[name].shape
        return torch.Size([self._replica_groups[name]] if name in self._replica_groups else [])

    def _stored(self, name: str, values: Any = None) -> List[_Stored]:
        """Return how the state tensors of one parameter are stored."""
        values = values or self._hyperparameters
        group = values.groups[self._group_of[name]]
        return [
            _Stored(f"{_prefix(tensor, values)}{name}", key, key in self._half_state, _velocity_scaling(values, group))
            for key, tensor in values.rule.state.items()
        ]

    def _round_state(self, part: int) -> None:
        optimizer = self._parts[part]
        with torch.no_grad():
            for parameter, held in optimizer.state.items():
                for stored in self._stored(self._names[id(parameter)]):
                    if stored.is_half and held.get(stored.key) is not None:
                        held[stored.key].copy_(stored.decoded(stored.encoded(held[stored.key])))

    def _of_part(self, part: int) -> List[Tuple[str, torch.nn.Parameter]]:
        """Return the parameters of one part by name, as torch's optimizer has them."""
        groups = self._parts[part].param_groups
        return [(self._names[id(parameter)], parameter) for group in groups for parameter in group["params"]]

    def _gradients(self, part: int) -> List[torch.Tensor]:
        gradients = [self.parameters[name].grad for name, _ in self._of_part(part)]
        return [gradient for gradient in gradients if gradient is not None]

    def _with_own_shape(self, name: str, value: Any) -> Any:
        """Return a state tensor of torch's optimizer with the shape of the parameter."""
        is_permuted = self._updated[name] is not self.parameters[name] and isinstance(value, torch.Tensor)
        return value.permute(_FROM_MEMORY_ORDER) if is_permuted and value.dim() else value


def _in_memory_order(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return a channels_last parameter as a contiguous one that shares its memory; any other one as it is.

    torch's fused kernels copy what is not contiguous.
    """
    if parameter.is_contiguous() or not parameter.is_contiguous(memory_format=torch.channels_last):
        return parameter
    return torch.nn.Parameter(parameter.detach().permute(_TO_MEMORY_ORDER), requires_grad=parameter.requires_grad)


class _Stored(NamedTuple):
    """A state tensor of one parameter: how the device stores it. The emulation has it in float32, unscaled."""

    name: str
    key: str
    is_half: bool
    scaling: float

    def encoded(self, value: Any) -> torch.Tensor:
        """Return a copy as the device stores it."""
        if not isinstance(value, torch.Tensor):
            return torch.tensor(float(value))  # the step count of older torch
        return (value * self.scaling).half() if self.is_half else value.clone()

    def decoded(self, stored: torch.Tensor) -> torch.Tensor:
        """Return a copy as the emulation computes with it."""
        value = stored.detach().to(torch.float32, copy=True)
        return value.div_(self.scaling) if self.is_half else value


def _prefix(tensor: StateTensor, values: Hyperparameters) -> str:
    return tensor.combined_prefix if values.is_combined and tensor.combined_prefix else tensor.prefix


def plain_step(optimizer: torch.optim.Optimizer) -> None:
    """Run `optimizer.step()` without torch's wrappers for the profiler and the compiler."""
    plain: Any = inspect.unwrap(type(optimizer).step)
    with torch.no_grad():
        plain(optimizer)


def _copied(value: Any) -> Any:
    # `clone` keeps the strides.
    return value.clone() if isinstance(value, torch.Tensor) else value


def _complete_state(optimizer: torch.optim.Optimizer) -> None:
    """Add the state that torch's RMSprop requires: the step count, and the momentum if it was 0 at the first step."""
    if isinstance(optimizer, torch.optim.RMSprop):
        for group in optimizer.param_groups:
            for held in (optimizer.state.get(parameter) for parameter in group["params"]):
                if held:
                    held.setdefault("step", torch.zeros(()))
                    if group["momentum"]:
                        held.setdefault("momentum_buffer", torch.zeros_like(held["square_avg"]))


def _half_state(values: Hyperparameters) -> Tuple[str, ...]:
    """Return the state tensors stored in half. A combined accumulator has the dtype of the accumulators."""
    options = {key: tensor.dtype_option for key, tensor in values.rule.state.items() if tensor.dtype_option}
    half = [key for key, option in options.items() if values.whole[option] == torch.half]
    if values.is_combined and values.accumulates_in_half:
        half = list(options)
    return tuple(half)


def _velocity_scaling(values: Hyperparameters, group: Dict[str, Any]) -> float:
    """Return the scaling of SGD's velocity: `loss_scaling`, or with `use_combined_accum` `velocity_scaling`."""
    if values.algorithm != "SGD":
        return 1.0
    return float(group["velocity_scaling"]) if values.is_combined else values.loss_scaling


def _construct(hyperparameters: Hyperparameters, groups: List[_Group]) -> torch.optim.Optimizer:
    with_values: List[Dict[str, Any]] = [
        {"params": list(group.values()), **values} for group, values in zip(groups, hyperparameters.groups)
    ]
    defaults = dict(hyperparameters.groups[0])
    if hyperparameters.algorithm == "LAMB":
        return PerParameter(with_values, defaults, lamb(hyperparameters.whole["bias_correction"]))
    if hyperparameters.whole.get("use_tf_variant"):
        return PerParameter(with_values, defaults, tf_rmsprop)
    algorithm: Any = hyperparameters.rule.host
    host_values = {name: value for name, value in defaults.items() if name not in OWN_GROUP_ATTRIBUTES}
    optimizer: torch.optim.Optimizer = algorithm(with_values, **host_values, **_fastest_kernel(algorithm))
    return optimizer


def _fastest_kernel(algorithm: Any) -> Dict[str, bool]:
    """Return the arguments that select the fused kernel if this torch has one for CPU tensors."""
    if "fused" in inspect.signature(algorithm).parameters:
        try:
            algorithm([torch.nn.Parameter(torch.zeros(1))], lr=0.1, fused=True)
        except RuntimeError:
            return {"foreach": False}
        return {"fused": True}
    return {"foreach": False}


def _split(parameters: _Group, parts: int) -> List[List[str]]:
    """Return the names of the parameters in parts of about equal size, largest first."""
    split: List[List[str]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    for name in sorted(parameters, key=lambda name: -parameters[name].numel()):
        smallest = sizes.index(min(sizes))
        split[smallest].append(name)
        sizes[smallest] += parameters[name].numel()
    return split
