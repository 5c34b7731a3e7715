"""Ops that are hints to the compiler: memory, recomputation, overlapped I/O and names. They do not change values."""

from __future__ import annotations

from typing import Any, List, Sequence

import torch

from poptorch.device_mode import Overlap, compiling_mode
from poptorch.enums import MatMulSerializationMode, OverlapMode
from poptorch.errors import Error
from poptorch.ops.arguments import ArgumentError, checked_tensor
from poptorch.pytree import flatten


class NameScope:
    """Context manager that names its ops in profiles and debuggers. No effect here: the emulation does not name ops.

    Args:
        name: a string (AssertionError for anything else).
    """

    def __init__(self, name: str) -> None:
        assert isinstance(name, str), f"Parameter to NameScope must be a string, not {type(name).__name__}"
        self.name = name

    def __enter__(self) -> NameScope:
        return self

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        """Do nothing."""


def nop(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, by an op that no compiler optimization removes."""
    return checked_tensor("nop", "tensor", tensor).clone()


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Mark tensors to be stored for the backward pass instead of recomputed. No effect here: all are stored.

    Returns:
        A tensor for one tensor, a tuple for several, and the same type of sequence for a single list or tuple.
    """
    if len(tensors) == 1:
        if isinstance(tensors[0], (list, tuple)):
            return type(tensors[0])([_view(tensor) for tensor in tensors[0]])
        return _view(tensors[0])
    return tuple(_view(tensor) for tensor in tensors)


def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """Limit the temporary memory of the op that made `tensor` to a share of a tile's memory. No effect here.

    Args:
        available_memory_proportion: in [0, 1].

    Returns:
        A view of the tensor.

    Raises:
        poptorch.Error and ValueError: other arguments.
    """
    checked_tensor("set_available_memory", "tensor", tensor)
    share = available_memory_proportion
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise ArgumentError(f"poptorch.set_available_memory: the proportion must be in [0, 1], not {share!r}")
    return tensor.view_as(tensor)


def serializedMatMul(
    lhs: torch.Tensor, rhs: torch.Tensor, mode: MatMulSerializationMode, factor: int = 0, keep_precision: bool = False
) -> torch.Tensor:
    """Return `torch.matmul(lhs, rhs)`. A device computes it in `factor` parts to save memory, the emulation at once.

    Args:
        mode: the dimension that is split: InputChannels the rows of `lhs`, ReducingDim the columns of `lhs` and rows
            of `rhs`, OutputChannels the columns of `rhs`, Disabled none.
        factor: number of parts; must divide the size of the dimension.
        keep_precision: add half partial results in float32; always done here.

    Raises:
        AssertionError: arguments of other types.
        poptorch.Error and ValueError: the factor does not divide the dimension.
    """
    is_mode = isinstance(mode, MatMulSerializationMode)
    assert is_mode, f"serializedMatMul: `mode` must be a poptorch.MatMulSerializationMode, not {mode!r}"
    is_count = isinstance(factor, int) and not isinstance(factor, bool)
    assert is_count, f"serializedMatMul: `factor` must be an int, not {factor!r}"
    assert isinstance(keep_precision, bool), (
        f"serializedMatMul: `keep_precision` must be a bool, not {keep_precision!r}"
    )
    if mode != MatMulSerializationMode.Disabled:
        _check_factor(lhs, rhs, mode, factor)
    return torch.matmul(lhs, rhs)


def set_overlap_for_input(input_tensors: Any, mode: OverlapMode) -> Any:
    """Overlap the host-to-device transfer of inputs of the model with compute. Affects time, not values.

    Args:
        input_tensors: a tensor, or tensors nested in tuples, lists and dictionaries; returned unchanged.
        mode: the loop to overlap with (AssertionError for anything else).
    """
    return _request_overlap(input_tensors, mode, is_input=True)


def set_overlap_for_output(output_tensors: Any, mode: OverlapMode) -> Any:
    """Overlap the device-to-host transfer of outputs of the model with compute. Affects time, not values.

    Args:
        output_tensors: a tensor, or tensors nested in tuples, lists and dictionaries; returned unchanged.
        mode: the loop to overlap with (AssertionError for anything else).
    """
    return _request_overlap(output_tensors, mode, is_input=False)


def check_transfers(
    overlaps: Sequence[Overlap], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> None:
    """Raise Error if an overlap was requested for a tensor that is not an input or output of the model."""
    for overlap in overlaps:
        tensors, what = (inputs, "input") if overlap.is_input else (outputs, "output")
        is_transferred = any(overlap.tensor is tensor for tensor in tensors)
        if overlap.mode != OverlapMode.NoOverlap and not is_transferred:
            where = "to an argument of forward" if overlap.is_input else "to what forward returns"
            raise Error(
                f"poptorch.set_overlap_for_{what} was applied to a tensor of shape {list(overlap.tensor.shape)} that "
                f"is not an {what} of the model: only transfers can overlap with compute. Apply it {where}"
            )


def _request_overlap(nested: Any, mode: OverlapMode, is_input: bool) -> Any:
    op = f"set_overlap_for_{'input' if is_input else 'output'}"
    assert isinstance(mode, OverlapMode), f"{op}: `mode` must be a poptorch.OverlapMode, not {mode!r}"
    compiling = compiling_mode()
    if compiling is not None:
        tensors: List[torch.Tensor] = flatten(nested)[0]
        compiling.overlaps += [Overlap(tensor, mode, is_input) for tensor in tensors]
    return nested


def _check_factor(lhs: torch.Tensor, rhs: torch.Tensor, mode: MatMulSerializationMode, factor: int) -> None:
    if lhs.dim() < 2 or rhs.dim() < 2:
        raise ArgumentError(
            f"poptorch.serializedMatMul: operands must have at least two dimensions, not {lhs.dim()} and {rhs.dim()}"
        )
    sizes = {
        MatMulSerializationMode.InputChannels: lhs.shape[-2],
        MatMulSerializationMode.ReducingDim: lhs.shape[-1],
        MatMulSerializationMode.OutputChannels: rhs.shape[-1],
    }
    if factor < 1 or sizes[mode] % factor:
        raise ArgumentError(
            f"poptorch.serializedMatMul: invalid serialization factor {factor} for {mode}: it must be at least 1 and "
            f"divide the dimension of size {sizes[mode]}"
        )


def _view(tensor: Any) -> torch.Tensor:
    return checked_tensor("recomputationCheckpoint", "tensors", tensor).view_as(tensor)
