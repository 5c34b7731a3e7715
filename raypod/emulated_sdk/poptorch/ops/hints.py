"""Ops that tell the compiler how to lay a model out, and leave its values as they are (contract 2.6)."""

from __future__ import annotations

from typing import Any, List, Sequence

import torch

from poptorch.device_mode import Overlap, compiling_mode
from poptorch.enums import MatMulSerializationMode, OverlapMode
from poptorch.errors import Error
from poptorch.ops.arguments import ArgumentError, checked_tensor
from poptorch.pytree import flatten


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


class NameScope:
    """Context: the ops within are named under `name`. The emulation names no ops, so it has no effect.

    AssertionError unless the name is a string.
    """

    def __init__(self, name: str) -> None:
        assert isinstance(name, str), f"Parameter to NameScope must be a string, not {type(name).__name__}"
        self.name = name

    def __enter__(self) -> NameScope:
        return self

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        """Nothing to undo."""


def set_overlap_for_input(input_tensors: Any, mode: OverlapMode) -> Any:
    """Say which loop the host-to-device transfer of these inputs of the model overlaps with; returns them.

    input_tensors: a tensor, or tensors nested in tuples, lists and dictionaries. AssertionError for other modes.
    """
    return _noted(input_tensors, mode, "set_overlap_for_input")


def set_overlap_for_output(output_tensors: Any, mode: OverlapMode) -> Any:
    """Say which loop the device-to-host transfer of these outputs of the model overlaps with; returns them.

    output_tensors: a tensor, or tensors nested in tuples, lists and dictionaries. AssertionError for other modes.
    """
    return _noted(output_tensors, mode, "set_overlap_for_output")


def check_transfers(
    overlaps: Sequence[Overlap], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> None:
    """Error when a transfer was asked to overlap that is none, as the tensor is no input or no output of the model."""
    for overlap in overlaps:
        tensors, what = (inputs, "input") if overlap.is_input else (outputs, "output")
        is_transferred = any(overlap.tensor is tensor for tensor in tensors)
        if overlap.mode != OverlapMode.NoOverlap and not is_transferred:
            where = "to an argument of forward" if overlap.is_input else "to what forward returns"
            raise Error(
                f"poptorch.set_overlap_for_{what} was applied to a tensor of shape {list(overlap.tensor.shape)} that "
                f"is not an {what} of the model: only transfers can overlap with computing. Apply it {where}"
            )


def _noted(nested: Any, mode: OverlapMode, op: str) -> Any:
    assert isinstance(mode, OverlapMode), f"{op}: mode is a poptorch.OverlapMode, not {mode!r}"
    compiling = compiling_mode()
    if compiling is not None:
        tensors: List[torch.Tensor] = flatten(nested)[0]
        compiling.overlaps += [Overlap(tensor, mode, op == "set_overlap_for_input") for tensor in tensors]
    return nested
