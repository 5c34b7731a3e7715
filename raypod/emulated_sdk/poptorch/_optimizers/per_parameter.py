"""Update rules that torch has not: LAMB, and RMSprop as TensorFlow has it (contract 4)."""

from __future__ import annotations

from typing import Any, Callable, Dict, List

import torch

# Changes a parameter in place, given its gradient, its state (empty at first) and the values of its group.
UpdateRule = Callable[[torch.Tensor, torch.Tensor, Dict[str, Any], Dict[str, Any]], None]


class PerParameter(torch.optim.Optimizer):
    """Applies one rule to every parameter that has a gradient."""

    def __init__(self, groups: List[Dict[str, Any]], defaults: Dict[str, Any], rule: UpdateRule) -> None:
        super().__init__(groups, defaults)
        self._rule = rule

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update; there is no closure on a device."""
        update_all(self, self._rule)


@torch.no_grad()
def update_all(optimizer: torch.optim.Optimizer, rule: UpdateRule) -> None:
    """Apply the rule to every parameter that has a gradient. RuntimeError for sparse gradients."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise RuntimeError(f"{type(optimizer).__name__} does not support sparse gradients")
            rule(parameter, parameter.grad, optimizer.state[parameter], group)


def lamb(bias_correction: bool) -> UpdateRule:
    """The rule of LAMB: Adam with decoupled weight decay, each parameter's step as long as `lr` times its norm.

    The norm of a parameter counts at most `max_weight_norm`; where either norm is 0, the step is `lr` times Adam's.
    """

    def update(parameter: torch.Tensor, gradient: torch.Tensor, state: Dict[str, Any], group: Dict[str, Any]) -> None:
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        first_decay, second_decay = group["betas"]
        mean = state["exp_avg"].mul_(first_decay).add_(gradient, alpha=1 - first_decay)
        square = state["exp_avg_sq"].mul_(second_decay).addcmul_(gradient, gradient, value=1 - second_decay)
        if bias_correction:
            steps = state["step"].item()
            mean, square = mean / (1 - first_decay**steps), square / (1 - second_decay**steps)
        step = mean / square.sqrt().add_(group["eps"])
        if group["weight_decay"]:
            step.add_(parameter, alpha=group["weight_decay"])
        weight_norm = parameter.norm().clamp(max=group["max_weight_norm"])
        step_norm = step.norm()
        has_norms = bool(weight_norm > 0) and bool(step_norm > 0)
        trust = (weight_norm / step_norm).item() if has_norms else 1.0
        parameter.add_(step, alpha=-group["lr"] * trust)

    return update


def tf_rmsprop(parameter: torch.Tensor, gradient: torch.Tensor, state: Dict[str, Any], group: Dict[str, Any]) -> None:
    """Squared gradients start at 1, eps is inside the square root, the momentum buffer holds steps, not gradients."""
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
