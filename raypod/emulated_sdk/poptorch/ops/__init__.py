"""`poptorch.ops`: the ops of PopTorch, for use inside `forward`. All of its names are also names of `poptorch`.

They work in wrapped models and, as ordinary functions of tensors, everywhere else.
"""

from __future__ import annotations

from poptorch.custom_operators.registry import custom_op
from poptorch.ops.algorithms import ctc_beam_search_decoder, fps, nearest
from poptorch.ops.annotations import (
    MultiConv,
    NameScope,
    identity_loss,
    nop,
    recomputationCheckpoint,
    serializedMatMul,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from poptorch.ops.control import cond, dynamic_slice, dynamic_update, for_loop
from poptorch.ops.host import CPU, ipu_print_tensor
from poptorch.parallel.blocks import BeginBlock, Block, BlockFunction, LegacyBeginBlockFn, removeBlocks

__all__ = [
    "CPU",
    "BeginBlock",
    "Block",
    "BlockFunction",
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
