"""Joins the batches of a batch sampler (contract 1.9, `batch_sampler`)."""

from __future__ import annotations

from typing import Any, Iterator, List, Sized, cast


class CombinedBatchSampler:
    """Joins so many consecutive batches of a batch sampler into one; a short rest is dropped or yielded."""

    def __init__(self, batch_sampler: Any, batches_to_combine: int, drop_last: bool) -> None:
        self._batch_sampler = batch_sampler
        self._batches_to_combine = batches_to_combine
        self._drop_last = drop_last

    def __iter__(self) -> Iterator[List[Any]]:
        gathered: List[Any] = []
        for count, batch in enumerate(self._batch_sampler, start=1):
            gathered += batch
            if count % self._batches_to_combine == 0:
                yield gathered
                gathered = []
        if gathered and not self._drop_last:
            yield gathered

    def __len__(self) -> int:
        batches = len(cast(Sized, self._batch_sampler))
        rest = batches % self._batches_to_combine > 0 and not self._drop_last
        return batches // self._batches_to_combine + rest
