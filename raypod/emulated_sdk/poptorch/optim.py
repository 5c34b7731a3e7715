"""`poptorch.optim`: torch's optimizers with loss scaling, half-precision state and compile-time constants.

The classes derive from torch's, so learning rate schedulers work on them. Their `step()` is not used: the device
updates its weights with the values of the last `setOptimizer`. An argument of None takes its default, which is in
`poptorch.optimizers.rules`, and is a compile-time constant.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any, Callable, Dict, Iterable, Optional, Tuple

import torch

from poptorch.environment import logger
from poptorch.optimizers.rules import OWN_GROUP_ATTRIBUTES, RULES, Rule, lamb, update_all

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]

# Arguments of torch's optimizers that select a kernel on the host; no effect on the device.
_IGNORED = ("foreach", "maximize", "capturable", "differentiable", "fused")
_ACCUMULATOR_TYPES = (torch.float32, torch.float16)
_NOT_COMPILED = "__dynamo_disable"  # attribute in which torch._compile caches the function to call instead


def _bypass_compiler() -> None:
    """Run the methods of torch.optim.Optimizer without torch's compiler, unless this process uses it already.

    Newer torch imports `torch._dynamo` at the first call of most methods of an optimizer, only to exclude them from
    compilation. The import takes more than a second per process.
    """
    if "torch._dynamo" in sys.modules:
        return
    for method in vars(torch.optim.Optimizer).values():
        original = getattr(method, "__wrapped__", None)
        if original is not None and not hasattr(original, _NOT_COMPILED):
            setattr(original, _NOT_COMPILED, original)


_bypass_compiler()  # before the first optimizer is constructed


class VariableAttributes:
    """Which attributes of an optimizer may change after compilation: the arguments passed explicitly."""

    def __init__(self, variable_attributes: Iterable[str], allowed_attributes: Iterable[str]) -> None:
        self._allowed_attributes = frozenset(allowed_attributes)
        self._variable_attributes = set(variable_attributes) & self._allowed_attributes

    def isConstant(self, attr: str) -> bool:
        """Return whether the attribute is a compile-time constant."""
        return attr not in self._variable_attributes

    def markAsConstant(self, attr: str) -> None:
        """Make the attribute a compile-time constant; AssertionError for an unknown attribute."""
        self._check(attr)
        self._variable_attributes.discard(attr)

    def markAsVariable(self, attr: str) -> None:
        """Let the attribute change after compilation; AssertionError for an unknown attribute."""
        self._check(attr)
        self._variable_attributes.add(attr)

    def _check(self, attr: str) -> None:
        valid = ", ".join(sorted(self._allowed_attributes))
        assert attr in self._allowed_attributes, f"Unknown attribute {attr!r}: valid are {valid}"


class Optimizer:
    """Base class of the device's optimizers: loss scaling, compile-time constants, and the state on the device."""

    variable_attrs: VariableAttributes
    loss_scaling: float
    max_grad_norm: float

    def __init__(self) -> None:
        self._ipu_state: Optional[Dict[str, Any]] = None
        self._ipu_param: Optional[Dict[str, Any]] = None
        self._host_is_newer = False
        self._fetch: Optional[Callable[[], None]] = None
        self._own: Tuple[str, ...] = ()

    def __getstate__(self) -> Dict[str, Any]:
        # A copy includes the state on the device, but not the device.
        own = {name: getattr(self, name) for name in ("_own", "variable_attrs", *self._own)}
        device = self._device_state()
        copied = {"_ipu_state": device["ipu_state"], "_ipu_param": device["ipu_param"], "_fetch": None}
        torch_state: Dict[str, Any] = super().__getstate__()  # type: ignore[misc]
        return {**torch_state, **own, **copied, "_host_is_newer": self.has_state()}

    def state_dict(self) -> Dict[str, Any]:
        """Return `ipu_state` and `ipu_param` of the device (None before compilation), and torch's state_dict.

        Copies the state from the device if the device has a newer one.
        """
        return self.get_state_dict()

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Load a `state_dict()`; the next call copies it to the device.

        Raises:
            RuntimeError: the state_dict of a torch optimizer.
        """
        _check_is_ipu_state(state)
        super().load_state_dict(  # type: ignore[misc]
            {"state": state.get("state", {}), "param_groups": state["param_groups"]}
        )
        self.set_state_dict(state)

    def get_state_dict(self) -> Dict[str, Any]:
        """Return the same as `state_dict()`."""
        torch_state: Dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return {**self._device_state(), **torch_state}

    def _device_state(self) -> Dict[str, Any]:
        if self._fetch is not None and not self._host_is_newer:
            self._fetch()
        return {"ipu_state": self._ipu_state, "ipu_param": self._ipu_param}

    def set_state_dict(self, state: Dict[str, Any]) -> None:
        """Load the device's part of a `state_dict()`; RuntimeError for the state_dict of a torch optimizer."""
        _check_is_ipu_state(state)
        self._ipu_state = state["ipu_state"]
        self._ipu_param = state["ipu_param"]
        self._host_is_newer = self.has_state()

    def has_state(self) -> bool:
        """Return whether the host has a state of the device."""
        return self._ipu_state is not None

    def _construct(self, rule: Rule, arguments: Dict[str, Any]) -> None:
        """Construct torch's class of the rule, and add the device's attributes.

        Args:
            arguments: all arguments of the constructor by name: its `locals()`.
        """
        given = {name: value for name, value in arguments.items() if value is not None and name != "self"}
        params = given.pop("params")
        _check_arguments(given)
        Optimizer.__init__(self)
        if rule.host is None:
            defaults = {name: given.get(name, default) for name, default in rule.group.items()}
            torch.optim.Optimizer.__init__(self, params, defaults)  # type: ignore[arg-type]
        else:
            known = [name for name in rule.group if name in given and name not in OWN_GROUP_ATTRIBUTES]
            rule.host.__init__(self, params, **{name: given[name] for name in known})
        self._add_own_attributes(rule, given)

    def _add_own_attributes(self, rule: Rule, given: Dict[str, Any]) -> None:
        host: Any = self
        unused = () if given.get("use_combined_accum") else ("velocity_scaling",)
        for name in (name for name in rule.group if name in OWN_GROUP_ATTRIBUTES and name not in unused):
            host.defaults.setdefault(name, given.get(name, rule.group[name]))
            for group in host.param_groups:
                group.setdefault(name, host.defaults[name])
        own = {**rule.scalars, **rule.constants}
        self._own = tuple(own)
        for name, default in own.items():
            setattr(self, name, given.get(name, default))
        allowed = [*rule.group, *rule.scalars]
        self.variable_attrs = VariableAttributes((name for name in allowed if name in given), allowed)


def _check_arguments(given: Dict[str, Any]) -> None:
    """Raise ValueError for unsupported values, and warn about arguments that the device ignores."""
    if given.get("amsgrad"):
        raise ValueError("The device does not support amsgrad: set it to False")
    for name, value in given.items():
        if name.endswith("accum_type") and value not in _ACCUMULATOR_TYPES:
            raise ValueError(f"{name} must be torch.float32 or torch.float16, not {value}")
        if name in ("loss_scaling", "velocity_scaling", "max_grad_norm") and not value > 0:
            raise ValueError(f"{name} must be positive, not {value}")
        if name in ("lr", "eps", "weight_decay", "max_weight_norm") and value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    is_combined = bool(given.get("use_combined_accum"))
    if "velocity_scaling" in given and not is_combined:
        logger.warning("velocity_scaling has no effect without use_combined_accum=True")
    ignored = [name for name in _IGNORED if given.get(name)]
    if ignored:
        warnings.warn(f"poptorch.optim ignores {', '.join(ignored)}: they select a kernel on the host", stacklevel=4)


def _check_is_ipu_state(state: Dict[str, Any]) -> None:
    if "ipu_state" not in state or "ipu_param" not in state:
        raise RuntimeError(
            "Only IPU optimizer states can be loaded onto the IPU: this one has no 'ipu_state' and 'ipu_param'. Was it "
            "saved by a torch optimizer?"
        )


class SGD(Optimizer, torch.optim.SGD):
    """Stochastic gradient descent; see `torch.optim.SGD` for the update rule."""

    def __init__(  # noqa: PLR0913  # the SDK's signature
        self,
        params: Iterable[Any],
        lr: float,
        momentum: Optional[float] = None,
        dampening: Optional[float] = None,
        weight_decay: Optional[float] = None,
        nesterov: Optional[bool] = None,
        maximize: Optional[bool] = None,
        foreach: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        velocity_scaling: Optional[float] = None,
        use_combined_accum: Optional[bool] = None,
        accum_type: Optional[torch.dtype] = None,
        velocity_accum_type: Optional[torch.dtype] = None,
        max_grad_norm: Optional[float] = None,
    ) -> None:
        self._construct(RULES["SGD"], locals())


class Adam(Optimizer, torch.optim.Adam):
    """Adam; see `torch.optim.Adam` for the update rule. `amsgrad` must stay False (ValueError)."""

    def __init__(  # noqa: PLR0913  # the SDK's signature
        self,
        params: Iterable[Any],
        lr: Optional[float] = None,
        betas: Optional[Tuple[float, float]] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        amsgrad: Optional[bool] = None,
        foreach: Optional[bool] = None,
        maximize: Optional[bool] = None,
        capturable: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        fused: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
        max_grad_norm: Optional[float] = None,
    ) -> None:
        self._construct(RULES["Adam"], locals())


class AdamW(Optimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay; see `torch.optim.AdamW`. `amsgrad` must stay False (ValueError).

    `bias_correction` has no effect: SDK 3.4 appears to correct the bias either way.
    """

    def __init__(  # noqa: PLR0913  # the SDK's signature
        self,
        params: Iterable[Any],
        lr: Optional[float] = None,
        betas: Optional[Tuple[float, float]] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        amsgrad: Optional[bool] = None,
        maximize: Optional[bool] = None,
        foreach: Optional[bool] = None,
        capturable: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        fused: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        bias_correction: Optional[bool] = None,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
        max_grad_norm: Optional[float] = None,
    ) -> None:
        self._construct(RULES["AdamW"], locals())


class RMSprop(Optimizer, torch.optim.RMSprop):
    """RMSprop; see `torch.optim.RMSprop`.

    With `use_tf_variant` the squared gradients start at 1, eps is inside the square root, and the momentum buffer
    accumulates steps, which include the learning rate.
    """

    def __init__(  # noqa: PLR0913  # the SDK's signature
        self,
        params: Iterable[Any],
        lr: Optional[float] = None,
        alpha: Optional[float] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        momentum: Optional[float] = None,
        centered: Optional[bool] = None,
        foreach: Optional[bool] = None,
        maximize: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
        use_tf_variant: Optional[bool] = None,
    ) -> None:
        self._construct(RULES["RMSprop"], locals())


class LAMB(Optimizer, torch.optim.Optimizer):
    """LAMB: Adam with decoupled weight decay; the step of each parameter is scaled to `lr` times the parameter's norm,
    at most `max_weight_norm`. `step()` works on the host.
    """

    bias_correction: bool

    def __init__(  # noqa: PLR0913  # the SDK's signature
        self,
        params: Iterable[Any],
        lr: Optional[float] = None,
        betas: Optional[Tuple[float, float]] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        bias_correction: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        max_weight_norm: Optional[float] = None,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
    ) -> None:
        self._construct(RULES["LAMB"], locals())

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Update the parameters on the host by the rule of the device, and return the value of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        update_all(self, lamb(self.bias_correction))
        return loss
