"""The ops of PopTorch, which programs use inside `forward` (contract 2.6); all are names of `poptorch` too.

They run inside wrapped models and, on plain tensors, anywhere else.
"""

from __future__ import annotations

from ._device.loss_rule import identity_loss
from ._ops.control_flow import cond, for_loop
from ._ops.ctc import ctc_beam_search_decoder
from ._ops.custom import custom_op
from ._ops.hints import nop, recomputationCheckpoint, serializedMatMul, set_available_memory
from ._ops.host_layer import CPU
from ._ops.multi_conv import MultiConv
from ._ops.naming import NameScope
from ._ops.overlap import set_overlap_for_input, set_overlap_for_output
from ._ops.points import fps, nearest
from ._ops.print_tensor import ipu_print_tensor
from ._ops.slicing import dynamic_slice, dynamic_update
from ._parallel.blocks import BeginBlock, Block, BlockFunction, LegacyBeginBlockFn, removeBlocks

__all__ = [
    "BeginBlock",
    "Block",
    "BlockFunction",
    "CPU",
    "LegacyBeginBlockFn",
    "MultiConv",
    "NameScope",
    "cond",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "for_loop",
    "fps",
    "identity_loss",
    "ipu_print_tensor",
    "nearest",
    "nop",
    "recomputationCheckpoint",
    "removeBlocks",
    "serializedMatMul",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
]
