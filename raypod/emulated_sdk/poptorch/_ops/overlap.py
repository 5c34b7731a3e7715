"""Overlapping the transfers of inputs and outputs with computing (contract 3, 2.6).

It changes the time of a step on a device, never its values. Compiling keeps the requests, in order to refuse what a
device would refuse.
"""

from __future__ import annotations

from typing import Any, List

import torch

from poptorch._device.mode import Overlap, compiling_mode
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


def _noted(nested: Any, mode: OverlapMode, op: str) -> Any:
    assert isinstance(mode, OverlapMode), f"{op}: mode is a poptorch.OverlapMode, not {mode!r}"
    compiling = compiling_mode()
    if compiling is not None:
        tensors: List[torch.Tensor] = flatten(nested)[0]
        compiling.overlaps += [Overlap(tensor, mode, op == "set_overlap_for_input") for tensor in tensors]
    return nested
