"""The device's own kernels, in the place of torch's: convolutions, and what they share.

EMULATED_POD_KERNELS=torch switches them off, so that every operator computes the bits of torch. The kernels of all
processes of a pod must be the same, or its weights depend on their placement.
"""

from __future__ import annotations

import os
import threading

import torch

from poptorch.errors import Error

VARIABLE = "EMULATED_POD_KERNELS"

_local = threading.local()


def are_enabled() -> bool:
    """Return whether models use these kernels. Raises Error if EMULATED_POD_KERNELS is neither own nor torch."""
    chosen = os.environ.get(VARIABLE) or "own"
    if chosen not in ("own", "torch"):
        raise Error(f"{VARIABLE}={chosen!r}: must be own or torch")
    return chosen == "own"


class Accumulating:
    """Context of a backward pass to the `grad` of all leaves, in which operators add to those of their weights.

    autograd would copy the first gradient of a weight, and read and write the others once more than necessary.
    """

    def __enter__(self) -> None:
        _local.is_accumulating = True

    def __exit__(self, *exc_info: object) -> None:
        _local.is_accumulating = False


def accumulates(weight: torch.Tensor) -> bool:
    """Return whether the present backward pass adds the gradient of `weight` to its `grad`."""
    # A hook on the weight observes the gradient that autograd passes to it.
    return getattr(_local, "is_accumulating", False) and weight.is_leaf and not weight._backward_hooks
