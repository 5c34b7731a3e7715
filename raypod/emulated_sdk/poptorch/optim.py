"""`poptorch.optim`: optimizers that know which attributes are compile-time constants (contract 4).

The classes derive from torch's, so that learning rate schedulers work on them. Their `step()` is not used: the device
updates its own weights, with the values that `setOptimizer` brought over last.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Callable, Dict, Iterable, Optional, Tuple

import torch

from ._optimizers.eager import keep_compiler_out

__all__ = ["Adam", "AdamW", "Optimizer", "RMSprop", "SGD", "VariableAttributes"]

keep_compiler_out()  # before the first optimizer is made

# Arguments of torch's own optimizers that choose a kernel on the host: without meaning on the device.
_IGNORED = ("foreach", "maximize", "capturable", "differentiable", "fused")


class VariableAttributes:
    """Which attributes of an optimizer may change after compilation: those that were passed explicitly."""

    def __init__(self, variable_attributes: Iterable[str], allowed_attributes: Iterable[str]) -> None:
        self._allowed = frozenset(allowed_attributes)
        self._variable = set(variable_attributes) & self._allowed

    def isConstant(self, attr: str) -> bool:
        """Whether the attribute is a compile-time constant."""
        return attr not in self._variable

    def markAsConstant(self, attr: str) -> None:
        """Make the attribute a compile-time constant. AssertionError for an unknown attribute."""
        self._check(attr)
        self._variable.discard(attr)

    def markAsVariable(self, attr: str) -> None:
        """Let the attribute change after compilation. AssertionError for an unknown attribute."""
        self._check(attr)
        self._variable.add(attr)

    def _check(self, attr: str) -> None:
        assert attr in self._allowed, f"Unknown attribute {attr!r}: known are {', '.join(sorted(self._allowed))}"


class Optimizer:
    """What the device's optimizers add to torch's: scaling, constants, and the state that lives on the device."""

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
        # A copy takes the device's state along, but not the device.
        own = {name: getattr(self, name) for name in ("_own", "variable_attrs", *self._own)}
        device = self.get_state_dict()
        copied = {"_ipu_state": device["ipu_state"], "_ipu_param": device["ipu_param"], "_fetch": None}
        torch_state: Dict[str, Any] = super().__getstate__()  # type: ignore[misc]
        return {**torch_state, **own, **copied, "_host_is_newer": self.has_state()}

    def state_dict(self) -> Dict[str, Any]:
        """`ipu_state` and `ipu_param` of the device (None before compilation), `state` and `param_groups` of torch.

        Reads the state back from the device when it is newer there.
        """
        torch_state: Dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return {**self.get_state_dict(), **torch_state}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Take over a state of `state_dict()`; it reaches the device with the next call.

        RuntimeError for the state of a torch optimizer.
        """
        _check_is_ipu_state(state)
        super().load_state_dict(  # type: ignore[misc]
            {"state": state.get("state", {}), "param_groups": state["param_groups"]}
        )
        self.set_state_dict(state)

    def get_state_dict(self) -> Dict[str, Any]:
        """The device's part of `state_dict()`."""
        if self._fetch is not None and not self._host_is_newer:
            self._fetch()
        return {"ipu_state": self._ipu_state, "ipu_param": self._ipu_param}

    def set_state_dict(self, state: Dict[str, Any]) -> None:
        """Take over the device's part of a `state_dict()`. RuntimeError for the state of a torch optimizer."""
        _check_is_ipu_state(state)
        self._ipu_state = state["ipu_state"]
        self._ipu_param = state["ipu_param"]
        self._host_is_newer = self.has_state()

    def has_state(self) -> bool:
        """Whether the host holds a state for the device."""
        return self._ipu_state is not None

    def _take(self, ipu_state: Dict[str, Any], ipu_param: Dict[str, Any]) -> None:
        """Called by the executor with the state that it read back."""
        self._ipu_state, self._ipu_param = ipu_state, ipu_param

    def _set_up(self, given: Dict[str, Any], allowed: Iterable[str], **own: Any) -> None:
        """Set attributes that torch's class has not, and note what was passed explicitly."""
        self._own = tuple(own)
        for name, value in own.items():
            setattr(self, name, value)
        explicit = [name for name, value in given.items() if value is not None]
        self.variable_attrs = VariableAttributes(["lr", *explicit], allowed)


def _check_is_ipu_state(state: Dict[str, Any]) -> None:
    if "ipu_state" not in state or "ipu_param" not in state:
        raise RuntimeError(
            "Only IPU optimizer states can be loaded onto the IPU: this one has no 'ipu_state' and 'ipu_param', as if "
            "a torch optimizer had saved it"
        )


def _for_torch(given: Dict[str, Any]) -> Dict[str, Any]:
    """The arguments of torch's constructor: those given and meant for the device."""
    ignored = [name for name in _IGNORED if given.get(name)]
    if ignored:
        warnings.warn(f"poptorch.optim ignores {', '.join(ignored)}: the device has one kernel", stacklevel=4)
    return {name: value for name, value in given.items() if value is not None and name not in _IGNORED}


def _refuse_amsgrad(amsgrad: Optional[bool]) -> None:
    if amsgrad:
        raise ValueError("amsgrad is not available on the device: leave it False")


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
        shared = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
        ignored = {"maximize": maximize, "foreach": foreach, "differentiable": differentiable}
        Optimizer.__init__(self)
        torch.optim.SGD.__init__(self, params, lr, **_for_torch({**shared, **ignored}))
        # In float32 the scaling of velocities is neutral; it is kept per group, as schedules change it.
        scaling = _default(velocity_scaling, _default(loss_scaling, 1.0))
        self.defaults["velocity_scaling"] = scaling
        for group in self.param_groups:
            group.setdefault("velocity_scaling", scaling)
        scalings = {"loss_scaling": loss_scaling, "velocity_scaling": velocity_scaling, "max_grad_norm": max_grad_norm}
        self._set_up(
            {**shared, **scalings},
            ["lr", *shared, *scalings],
            loss_scaling=_default(loss_scaling, 1.0),
            use_combined_accum=_default(use_combined_accum, False),
            accum_type=_accumulator_type(accum_type),
            velocity_accum_type=_accumulator_type(velocity_accum_type),
            max_grad_norm=_default(max_grad_norm, math.inf),
        )


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
        _refuse_amsgrad(amsgrad)
        shared = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        ignored = {"foreach": foreach, "maximize": maximize, "capturable": capturable, "fused": fused}
        Optimizer.__init__(self)
        arguments = _for_torch({**shared, **ignored, "differentiable": differentiable})
        torch.optim.Adam.__init__(self, params, **arguments)
        scalings = {"loss_scaling": loss_scaling, "max_grad_norm": max_grad_norm}
        self._set_up(
            {**shared, **scalings},
            [*shared, *scalings],
            loss_scaling=_default(loss_scaling, 1.0),
            accum_type=_accumulator_type(accum_type),
            first_order_momentum_accum_type=_accumulator_type(first_order_momentum_accum_type),
            second_order_momentum_accum_type=_accumulator_type(second_order_momentum_accum_type),
            max_grad_norm=_default(max_grad_norm, math.inf),
        )


class AdamW(Optimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay; see `torch.optim.AdamW`. `amsgrad` must stay False (ValueError).

    `bias_correction` is kept without effect, as SDK 3.4 appears to correct either way (contract 4).
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
        _refuse_amsgrad(amsgrad)
        shared = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        ignored = {"foreach": foreach, "maximize": maximize, "capturable": capturable, "fused": fused}
        Optimizer.__init__(self)
        arguments = _for_torch({**shared, **ignored, "differentiable": differentiable})
        torch.optim.AdamW.__init__(self, params, **arguments)
        scalings = {"loss_scaling": loss_scaling, "max_grad_norm": max_grad_norm}
        self._set_up(
            {**shared, **scalings},
            [*shared, *scalings],
            loss_scaling=_default(loss_scaling, 1.0),
            bias_correction=_default(bias_correction, True),
            accum_type=_accumulator_type(accum_type),
            first_order_momentum_accum_type=_accumulator_type(first_order_momentum_accum_type),
            second_order_momentum_accum_type=_accumulator_type(second_order_momentum_accum_type),
            max_grad_norm=_default(max_grad_norm, math.inf),
        )


class RMSprop(Optimizer, torch.optim.RMSprop):
    """RMSprop; see `torch.optim.RMSprop`.

    With `use_tf_variant` the squared-gradient buffer starts at 1, eps is added inside the square root and the learning
    rate is folded into the momentum buffer.
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
        shared = {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        ignored = {"foreach": foreach, "maximize": maximize, "differentiable": differentiable}
        Optimizer.__init__(self)
        torch.optim.RMSprop.__init__(self, params, **_for_torch({**shared, "centered": centered, **ignored}))
        self._set_up(
            {**shared, "loss_scaling": loss_scaling},
            [*shared, "centered", "loss_scaling"],
            loss_scaling=_default(loss_scaling, 1.0),
            accum_type=_accumulator_type(accum_type),
            first_order_momentum_accum_type=_accumulator_type(first_order_momentum_accum_type),
            second_order_momentum_accum_type=_accumulator_type(second_order_momentum_accum_type),
            use_tf_variant=_default(use_tf_variant, False),
            max_grad_norm=math.inf,
        )


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _accumulator_type(dtype: Optional[torch.dtype]) -> torch.dtype:
    """float32 or half, else ValueError. The emulation accumulates in float32 either way."""
    chosen: torch.dtype = _default(dtype, torch.float32)
    if chosen not in (torch.float32, torch.float16):
        raise ValueError(f"Accumulators are torch.float32 or torch.float16, not {chosen}")
    return chosen
