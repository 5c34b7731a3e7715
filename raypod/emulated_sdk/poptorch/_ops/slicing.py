"""Slices whose place is known only when the model runs (contract 2.6)."""

from __future__ import annotations

from typing import Tuple, Union

import torch

from poptorch._ops.arguments import ArgumentError, Signature, checked_int, checked_tensor

_Start = Union[int, torch.Tensor]


def dynamic_slice(tensor: torch.Tensor, dim: int, start: _Start, size: int, step: int) -> torch.Tensor:
    """`tensor[start : start + size : step]` along `dim`, a copy; differentiable.

    start: an int, or a tensor of one integer. size, step: constants of at least 1.

    Returns a tensor with ceil(size / step) elements along `dim`. Error, which is also a ValueError, for other arguments
    and for a slice that leaves the tensor.
    """
    checked_tensor("dynamic_slice", "tensor", tensor)
    checked_int("dynamic_slice", "step", step, least=1)
    dim, begin = _place("dynamic_slice", tensor, dim, start, size)
    return tensor.narrow(dim, begin, size)[(slice(None),) * dim + (slice(None, None, step),)].clone()


def dynamic_update(input: torch.Tensor, src: torch.Tensor, dim: int, start: _Start, size: int) -> torch.Tensor:
    """A copy of `input` whose slice [start : start + size] along `dim` is `src`; differentiable in both.

    start: an int, or a tensor of one integer. size: a constant of at least 1.

    Error, which is also a ValueError, for other arguments, a slice that leaves the tensor, and a `src` that is not of
    the slice's shape and dtype.
    """
    checked_tensor("dynamic_update", "input", input)
    checked_tensor("dynamic_update", "src", src)
    dim, begin = _place("dynamic_update", input, dim, start, size)
    slot = Signature.of([input.narrow(dim, begin, size)])
    given = Signature.of([src])
    if slot != given:
        raise ArgumentError(f"poptorch.dynamic_update: `src` is {given}, but the slice to replace is {slot}")
    return torch.slice_scatter(input, src, dim, begin, begin + size)


def _place(op: str, tensor: torch.Tensor, dim: int, start: _Start, size: int) -> Tuple[int, int]:
    checked_int(op, "size", size, least=1)
    checked_int(op, "dim", dim, least=-tensor.dim())
    if dim >= tensor.dim():
        raise ArgumentError(f"poptorch.{op}: `dim` is {dim}, but the tensor has {tensor.dim()} dimensions")
    dim %= tensor.dim()
    begin = _start(op, start)
    if not 0 <= begin <= tensor.shape[dim] - size:
        raise ArgumentError(
            f"poptorch.{op}: a slice of {size} from {begin} leaves dimension {dim}, which has {tensor.shape[dim]} "
            "elements"
        )
    return dim, begin


def _start(op: str, start: _Start) -> int:
    if not isinstance(start, torch.Tensor):
        return checked_int(op, "start", start, least=0)
    if start.numel() != 1 or start.is_floating_point() or start.dtype == torch.bool:
        raise ArgumentError(f"poptorch.{op}: `start` is one integer, not {Signature.of([start])}")
    return int(start.item())
