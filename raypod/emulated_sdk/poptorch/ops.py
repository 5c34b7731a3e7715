"""The ops of PopTorch, which programs use inside `forward` (contract 2.6); all are names of `poptorch` too.

They run inside wrapped models and, on plain tensors, anywhere else.
"""

from __future__ import annotations

from poptorch._device.loss_rule import identity_loss
from poptorch._ops.control_flow import cond, for_loop
from poptorch._ops.ctc import ctc_beam_search_decoder
from poptorch._ops.custom import custom_op
from poptorch._ops.hints import nop, recomputationCheckpoint, serializedMatMul, set_available_memory
from poptorch._ops.host_layer import CPU
from poptorch._ops.multi_conv import MultiConv
from poptorch._ops.naming import NameScope
from poptorch._ops.overlap import set_overlap_for_input, set_overlap_for_output
from poptorch._ops.points import fps, nearest
from poptorch._ops.print_tensor import ipu_print_tensor
from poptorch._ops.slicing import dynamic_slice, dynamic_update
from poptorch._parallel.blocks import BeginBlock, Block, BlockFunction, LegacyBeginBlockFn, removeBlocks

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
