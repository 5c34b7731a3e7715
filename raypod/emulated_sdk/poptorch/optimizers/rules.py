"""The update rules of the device: attributes, defaults and state of each optimizer, and the rules that torch lacks.

The host's optimizer classes, the check of compile-time constants and the device use the same table.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Mapping, NamedTuple

import torch


class StateTensor(NamedTuple):
    """A tensor of the optimizer state of each parameter.

    Attributes:
        prefix: its name in `ipu_state` is this prefix and the parameter's name.
        dtype_option: attribute with its dtype; None for float32.
        combined_prefix: the prefix with `use_combined_accum`, if it is another one.
    """

    prefix: str
    dtype_option: Any = None
    combined_prefix: str = ""


class Rule(NamedTuple):
    """One algorithm.

    Attributes:
        host: torch's class; None if torch has none.
        group: attributes of each parameter group, with torch's defaults.
        scalars: attributes of the optimizer as a whole that may be variable.
        constants: attributes of the optimizer as a whole that are compile-time constants.
        state: the state, by torch's names.
    """

    host: Any
    group: Mapping[str, Any]
    scalars: Mapping[str, float]
    constants: Mapping[str, Any]
    state: Mapping[str, StateTensor]


_MOMENTS: Dict[str, Any] = dict.fromkeys(
    ("accum_type", "first_order_momentum_accum_type", "second_order_momentum_accum_type"), torch.float32
)
_LOSS: Dict[str, float] = {"loss_scaling": 1.0}
_LOSS_AND_NORM: Dict[str, float] = {**_LOSS, "max_grad_norm": math.inf}
_ADAM: Dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0}
# The prefixes are those of PopART's tensors.
_ADAM_STATE = {
    "step": StateTensor("Step___"),
    "exp_avg": StateTensor("Accl1___", "first_order_momentum_accum_type"),
    "exp_avg_sq": StateTensor("Accl2___", "second_order_momentum_accum_type"),
}

RULES: Dict[str, Rule] = {
    "SGD": Rule(
        host=torch.optim.SGD,
        group={
            "lr": 1e-3,
            "momentum": 0,
            "dampening": 0,
            "weight_decay": 0,
            "nesterov": False,
            "velocity_scaling": 1.0,
        },
        scalars=_LOSS_AND_NORM,
        constants={"use_combined_accum": False, "accum_type": torch.float32, "velocity_accum_type": torch.float32},
        state={"momentum_buffer": StateTensor("Accl1___", "velocity_accum_type", combined_prefix="Accl___")},
    ),
    "Adam": Rule(torch.optim.Adam, group=_ADAM, scalars=_LOSS_AND_NORM, constants=_MOMENTS, state=_ADAM_STATE),
    "AdamW": Rule(
        host=torch.optim.AdamW,
        group={**_ADAM, "weight_decay": 1e-2},
        scalars=_LOSS_AND_NORM,
        constants={**_MOMENTS, "bias_correction": True},
        state=_ADAM_STATE,
    ),
    "RMSprop": Rule(
        host=torch.optim.RMSprop,
        group={"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0, "momentum": 0, "centered": False},
        scalars=_LOSS,
        constants={**_MOMENTS, "use_tf_variant": False},
        state={
            "step": StateTensor("Step___"),
            "square_avg": StateTensor("Accl1___", "second_order_momentum_accum_type"),
            "grad_avg": StateTensor("Accl2___", "first_order_momentum_accum_type"),
            "momentum_buffer": StateTensor("Accl3___", "first_order_momentum_accum_type"),
        },
    ),
    "LAMB": Rule(
        host=None,
        group={**_ADAM, "weight_decay": 1e-2, "max_weight_norm": 65500.0},
        scalars=_LOSS,
        constants={**_MOMENTS, "bias_correction": True},
        state=_ADAM_STATE,
    ),
}

# Attributes that torch's constructors do not take.
OWN_GROUP_ATTRIBUTES = ("velocity_scaling", "max_weight_norm")


# Updates a parameter in place, given its gradient, its state (empty at first) and the values of its group.
UpdateRule = Callable[[torch.Tensor, torch.Tensor, Dict[str, Any], Dict[str, Any]], None]


class PerParameter(torch.optim.Optimizer):
    """Applies one rule to every parameter with a gradient."""

    def __init__(self, groups: List[Dict[str, Any]], defaults: Dict[str, Any], rule: UpdateRule) -> None:
        super().__init__(groups, defaults)
        self._rule = rule

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters; `closure` is not used."""
        update_all(self, self._rule)


@torch.no_grad()
def update_all(optimizer: torch.optim.Optimizer, rule: UpdateRule) -> None:
    """Apply the rule to every parameter with a gradient; RuntimeError for sparse gradients."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise RuntimeError(f"{type(optimizer).__name__} does not support sparse gradients")
            rule(parameter, parameter.grad, optimizer.state[parameter], group)


def lamb(bias_correction: bool) -> UpdateRule:
    """Return the rule of LAMB: Adam's step with decoupled weight decay, scaled to `lr` times the parameter's norm.

    The norm is limited to `max_weight_norm`. If either norm is 0, the step is `lr` times Adam's.
    """

    def update(parameter: torch.Tensor, gradient: torch.Tensor, state: Dict[str, Any], group: Dict[str, Any]) -> None:
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        mean = state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if bias_correction:
            steps = state["step"].item()
            mean, square = mean / (1 - beta1**steps), square / (1 - beta2**steps)
        step = mean / square.sqrt().add_(group["eps"])
        if group["weight_decay"]:
            step.add_(parameter, alpha=group["weight_decay"])
        weight_norm = parameter.norm().clamp(max=group["max_weight_norm"])
        step_norm = step.norm()
        has_norms = bool(weight_norm > 0) and bool(step_norm > 0)
        trust_ratio = (weight_norm / step_norm).item() if has_norms else 1.0
        parameter.add_(step, alpha=-group["lr"] * trust_ratio)

    return update


def tf_rmsprop(parameter: torch.Tensor, gradient: torch.Tensor, state: Dict[str, Any], group: Dict[str, Any]) -> None:
    """Update by TensorFlow's RMSprop.

    The squared gradients start at 1, eps is inside the square root, and the momentum buffer accumulates steps.
    """
    if not state:
        state["square_avg"] = torch.ones_like(parameter)
        state["momentum_buffer"] = torch.zeros_like(parameter)
        state["grad_avg"] = torch.zeros_like(parameter)
    if group["weight_decay"]:
        gradient = gradient.add(parameter, alpha=group["weight_decay"])
    decay = group["alpha"]
    mean_square = state["square_avg"].mul_(decay).addcmul_(gradient, gradient, value=1 - decay)
    if group["centered"]:
        mean = state["grad_avg"].lerp_(gradient, 1 - decay)
        mean_square = mean_square.addcmul(mean, mean, value=-1)
    step = gradient.mul(group["lr"]).div_((mean_square + group["eps"]).sqrt_())
    parameter.sub_(state["momentum_buffer"].mul_(group["momentum"]).add_(step))
