"""`identity_loss`: mark a tensor as a loss."""

from __future__ import annotations

import torch

from poptorch.device_mode import active_mode


def identity_loss(x: torch.Tensor, reduction: str) -> torch.Tensor:
    """Mark `x` as a loss, reduced by "sum", "mean" or "none" (0, 1 and 2 as in the SDK).

    On the host it is the plain differentiable reduction.

    Returns:
        A 0-d tensor for "sum" and "mean", a tensor of the shape of `x` for "none".

    Raises:
        AssertionError: another reduction.
    """
    loss = _reduced(x, reduction)
    mode = active_mode()
    return loss if mode is None else mode.mark(loss)


def _reduced(x: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction in ("sum", 0):
        return x.sum()
    if reduction in ("mean", 1):
        return x.mean()
    assert reduction in ("none", 2), f"Unsupported reduction {reduction!r}: use 'sum', 'mean' or 'none'"
    return x.clone()
