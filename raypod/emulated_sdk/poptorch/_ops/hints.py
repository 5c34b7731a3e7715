"""Ops that tell the compiler how to lay a model out, and leave its values as they are (contract 2.6)."""

from __future__ import annotations

from typing import Any

import torch

from poptorch._ops.arguments import ArgumentError, checked_tensor
from poptorch.enums import MatMulSerializationMode


def nop(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a tensor of its own, which no optimisation of a compiler removes."""
    return checked_tensor("nop", "tensor", tensor).clone()


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Tensors that are kept for the backward pass instead of being computed again; here all are kept.

    Returns one tensor for one, a tuple for several, and the same kind of sequence for a single list or tuple.
    """
    if len(tensors) == 1:
        if isinstance(tensors[0], (list, tuple)):
            return type(tensors[0])([_kept(tensor) for tensor in tensors[0]])
        return _kept(tensors[0])
    return tuple(_kept(tensor) for tensor in tensors)


def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """Limit the temporary memory of the op that made `tensor` to a share in [0, 1] of a tile's; no effect here.

    Returns the tensor. Error, which is also a ValueError, for other arguments.
    """
    checked_tensor("set_available_memory", "tensor", tensor)
    share = available_memory_proportion
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise ArgumentError(f"poptorch.set_available_memory: a proportion of memory is in [0, 1], not {share!r}")
    return tensor.view_as(tensor)


def serializedMatMul(
    lhs: torch.Tensor, rhs: torch.Tensor, mode: MatMulSerializationMode, factor: int = 0, keep_precision: bool = False
) -> torch.Tensor:
    """`torch.matmul(lhs, rhs)`, which a device computes in `factor` parts to save memory; here it is one.

    mode: what is cut: InputChannels the rows of `lhs`, ReducingDim the columns of `lhs` and rows of `rhs`,
        OutputChannels the columns of `rhs`; Disabled nothing.
    factor: number of parts, which must divide the size of what is cut.
    keep_precision: whether half partial results would be added in float32; they always are here.

    AssertionError for arguments of other types; Error, which is also a ValueError, for a factor that does not divide.
    """
    is_mode = isinstance(mode, MatMulSerializationMode)
    assert is_mode, f"serializedMatMul: mode is a poptorch.MatMulSerializationMode, not {mode!r}"
    is_count = isinstance(factor, int) and not isinstance(factor, bool)
    assert is_count, f"serializedMatMul: factor is an int, not {factor!r}"
    assert isinstance(keep_precision, bool), f"serializedMatMul: keep_precision is a bool, not {keep_precision!r}"
    if mode != MatMulSerializationMode.Disabled:
        _check_factor(lhs, rhs, mode, factor)
    return torch.matmul(lhs, rhs)


def _check_factor(lhs: torch.Tensor, rhs: torch.Tensor, mode: MatMulSerializationMode, factor: int) -> None:
    if lhs.dim() < 2 or rhs.dim() < 2:
        raise ArgumentError(
            f"poptorch.serializedMatMul: operands have at least two dimensions, not {lhs.dim()} and {rhs.dim()}"
        )
    sizes = {
        MatMulSerializationMode.InputChannels: lhs.shape[-2],
        MatMulSerializationMode.ReducingDim: lhs.shape[-1],
        MatMulSerializationMode.OutputChannels: rhs.shape[-1],
    }
    if factor < 1 or sizes[mode] % factor:
        raise ArgumentError(
            f"poptorch.serializedMatMul: invalid serialisation factor {factor} for {mode}: it must be at least 1 and "
            f"divide the dimension of {sizes[mode]}"
        )


def _kept(tensor: Any) -> torch.Tensor:
    return checked_tensor("recomputationCheckpoint", "tensors", tensor).view_as(tensor)
