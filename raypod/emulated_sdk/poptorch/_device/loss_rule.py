"""The loss rule of training (contract 2.4): exactly one final marked loss."""

from __future__ import annotations

from typing import Any, List, Optional, Set

import torch

from poptorch._device.mode import active_mode
from poptorch._errors import Error


def identity_loss(x: torch.Tensor, reduction: str) -> torch.Tensor:
    """Mark `x` as loss, reduced by "sum", "mean" or "none" (also 0, 1 and 2, as the SDK has it).

    Returns a 0-d tensor for "sum" and "mean", a tensor of the shape of `x` for "none". On the host it is the plain
    differentiable reduction. AssertionError for other reductions.
    """
    loss = _reduced(x, reduction)
    mode = active_mode()
    return loss if mode is None else mode.mark(loss)


def final_loss(marks: List[torch.Tensor]) -> torch.Tensor:
    """The final one of the marked losses, in the order of marking.

    Error when there is none, when two do not feed one another, and when the final loss is not a single number.
    """
    if not marks:
        raise Error(
            "Couldn't find a loss in graph! Compute it by a torch loss, or mark it by "
            "poptorch.identity_loss(x, reduction)"
        )
    final = marks[-1]
    fed_by = ancestors(final)
    independent = [mark for mark in marks[:-1] if mark.grad_fn not in fed_by]
    if independent:
        raise Error(
            f"Multiple independent losses found in graph: {len(independent)} of {len(marks)} losses do not feed the "
            "last one. Combine them and mark the result by poptorch.identity_loss(x, reduction)"
        )
    if final.numel() != 1:
        # The contract leaves open what the device makes of it, so the emulation asks for a defined reduction.
        raise Error(f"The final loss has shape {list(final.shape)}: reduce it to one number by 'sum' or 'mean'")
    return final


def _reduced(x: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction in ("sum", 0):
        return x.sum()
    if reduction in ("mean", 1):
        return x.mean()
    assert reduction in ("none", 2), f"Unsupported reduction {reduction!r}: use 'sum', 'mean' or 'none'"
    return x.clone()


def ancestors(loss: torch.Tensor) -> Set[Optional[Any]]:
    """All nodes of the autograd graph behind a loss; {None} when nothing of it can be trained."""
    seen: Set[Optional[Any]] = {None} if loss.grad_fn is None else set()
    pending = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [parent for parent, _ in node.next_functions]
    return seen
