"""`poptorch._utils`: the internal functions of PopTorch that its package for PyTorch Geometric imports."""

from __future__ import annotations

from typing import Iterator, Sequence

import torch

__all__ = ["combine_batch_tensors_gen"]


def combine_batch_tensors_gen(tensors: Sequence[Sequence[torch.Tensor]]) -> Iterator[torch.Tensor]:
    """Yield the tensors of several batches, concatenated along dimension 0; `tensors` has those of each batch."""
    return map(torch.cat, zip(*tensors))
