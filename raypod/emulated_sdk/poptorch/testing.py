"""`poptorch.testing`: helpers for the tests of programs."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["allclose"]


def allclose(ref: Any, other: Any) -> bool:
    """Return whether two results are close by `torch.allclose`: tensors, or equally nested tuples and lists of them.

    Raises:
        TypeError: a value of `ref` is neither, or that of `other` is no tensor.
        RuntimeError: two tensors have different dtypes.
    """
    if isinstance(ref, torch.Tensor):
        return torch.allclose(other, ref)
    if not isinstance(ref, (tuple, list)):
        raise TypeError(f"poptorch.testing.allclose takes tensors, tuples and lists, not {type(ref).__name__}")
    kind = tuple if isinstance(ref, tuple) else list
    return isinstance(other, kind) and len(ref) == len(other) and all(map(allclose, ref, other))
