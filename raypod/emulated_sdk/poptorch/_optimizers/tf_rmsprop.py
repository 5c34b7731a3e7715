"""RMSprop by TensorFlow's rule, which torch has not (contract 4: `use_tf_variant`)."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional

import torch


class TfRMSprop(torch.optim.Optimizer):
    """Squared gradients start at 1, eps is inside the square root, the momentum buffer holds steps, not gradients."""

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], float]] = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; there is no closure on a device."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, parameter.grad, self.state[parameter], group)


def _update(parameter: torch.Tensor, gradient: torch.Tensor, state: Dict[str, Any], group: Dict[str, Any]) -> None:
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
