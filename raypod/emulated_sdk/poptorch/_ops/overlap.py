"""Overlapping the transfers of inputs and outputs with computing (contract 3, 2.6).

It changes the time of a step on a device, never its values. Compiling keeps the requests, in order to refuse what a
device would refuse.
"""

from __future__ import annotations

from typing import Any, List, Sequence

import torch

from poptorch._device.mode import Overlap, compiling_mode
from poptorch._errors import Error
from poptorch._executor.structure import flatten
from poptorch.enums import OverlapMode


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
