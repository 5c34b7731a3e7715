"""Whether an operator may add the gradient of a weight to its `grad` itself.

autograd would copy the first gradient of a weight, and read and write the others once more than necessary.
"""

from __future__ import annotations

import threading

import torch

_local = threading.local()


class Accumulating:
    """Context of a backward pass to the `grad` of all leaves, in which operators add to those of their weights."""

    def __enter__(self) -> None:
        _local.is_accumulating = True

    def __exit__(self, *exc_info: object) -> None:
        _local.is_accumulating = False


def accumulates(weight: torch.Tensor) -> bool:
    """Return whether the present backward pass adds the gradient of `weight` to its `grad`."""
    # A hook on the weight observes the gradient that autograd passes to it.
    return getattr(_local, "is_accumulating", False) and weight.is_leaf and not weight._backward_hooks
