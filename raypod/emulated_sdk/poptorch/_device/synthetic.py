"""Synthetic data: a run without any exchange with the host (contract 1.2: `enableSyntheticData`)."""

from __future__ import annotations

from typing import List

import torch

from poptorch._executor.arguments import Arguments
from poptorch._executor.layout import BatchLayout


def synthetic_block(arguments: Arguments, layout: BatchLayout) -> List[torch.Tensor]:
    """One micro-batch for all: floating point tensors are normally distributed, others zero, valid labels and indices.

    The numbers are the same in every run.
    """
    generator = torch.Generator().manual_seed(0)
    block = []
    for dtype, shape in arguments.compiled.described:
        micro_batch = (shape[0] // layout.input_blocks, *shape[1:]) if shape else ()
        if dtype.is_floating_point:
            block.append(torch.randn(micro_batch, generator=generator).to(dtype))
        else:
            block.append(torch.zeros(micro_batch, dtype=dtype))
    return block
