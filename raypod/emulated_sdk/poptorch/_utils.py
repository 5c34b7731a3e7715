"""`poptorch._utils`: the internal functions of PopTorch that its package for PyTorch Geometric and programs import."""

from __future__ import annotations

from typing import Any, Iterable, Iterator, List, Sequence

import torch

from poptorch.pytree import flatten

__all__ = ["combine_batch_tensors_gen", "flattenTensorStructure", "reconstructTensorStructure"]


def combine_batch_tensors_gen(tensors: Sequence[Sequence[torch.Tensor]]) -> Iterator[torch.Tensor]:
    """Yield the tensors of several batches, concatenated along dimension 0; `tensors` has those of each batch."""
    return map(torch.cat, zip(*tensors))


def flattenTensorStructure(tensors: Any, canonical_structure: Any = None) -> List[torch.Tensor]:
    """Return the tensors in nested tuples, lists, dictionaries and values with a registered parser, in order."""
    return flatten(tensors)[0]


def reconstructTensorStructure(structure: Any, values: Iterable[Any]) -> Any:
    """Return the same structure with these values in the place of its tensors."""
    return flatten(structure)[1].unflatten(list(values))
