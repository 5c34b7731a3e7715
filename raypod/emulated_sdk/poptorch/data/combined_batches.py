"""Concatenates the batches of a user's batch sampler to combined batches."""

from __future__ import annotations

from typing import Any, Iterable, Iterator, List

import torch

from poptorch.pytree import flatten


class CombinedBatches:
    """Iterates over `batches` and concatenates every `count` of them along dimension 0.

    The batches of a combined batch may differ in size. Their dtypes are those of the first one; values that are not
    tensors are those of the last one.

    Args:
        count: the batches of a combined batch.
        drop_last: drop the last combined batch if it has fewer.
        are_reused: the memory of a batch is reused for the next one.
    """

    def __init__(self, batches: Iterable[Any], count: int, drop_last: bool, are_reused: bool = False) -> None:
        self._batches, self._count, self._drop_last, self._are_reused = batches, count, drop_last, are_reused

    def __iter__(self) -> Iterator[Any]:
        parts: List[List[torch.Tensor]] = []
        for batch in self._batches:
            tensors, spec = flatten(batch)
            parts.append([tensor.clone() for tensor in tensors] if self._are_reused else tensors)
            if len(parts) == self._count:
                yield spec.unflatten(_concatenate(parts))
                parts = []
        if parts and not self._drop_last:
            yield spec.unflatten(_concatenate(parts))


def _concatenate(parts: List[List[torch.Tensor]]) -> List[torch.Tensor]:
    """Concatenate the first tensors of all parts, the second ones, and so on."""
    if len(parts) == 1:
        return parts[0]
    return [torch.cat([tensor.to(column[0].dtype) for tensor in column]) for column in zip(*parts)]
