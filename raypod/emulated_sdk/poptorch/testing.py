"""`poptorch.testing`: helpers for the tests of programs."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["allclose"]


def allclose(ref: Any, other: Any) -> bool:
    """Return whether two results are close by `torch.allclose`.

    Compares tensors, and equally nested tuples, lists and dicts of them. Shapes must be equal; dtypes may differ, as
    the device narrows them (e.g. int64 to int32). Values that are not tensors must be equal.
    """
    if isinstance(ref, torch.Tensor):
        return isinstance(other, torch.Tensor) and ref.shape == other.shape and _is_close(ref, other)
    if isinstance(ref, dict):
        return isinstance(other, dict) and ref.keys() == other.keys() and all(allclose(ref[k], other[k]) for k in ref)
    if isinstance(ref, (tuple, list)):
        is_sequence = isinstance(other, (tuple, list)) and len(ref) == len(other)
        return is_sequence and all(map(allclose, ref, other))
    return bool(ref == other)


def _is_close(ref: torch.Tensor, other: torch.Tensor) -> bool:
    common = torch.promote_types(ref.dtype, other.dtype)
    return torch.allclose(ref.to(common), other.to(common))
