"""`poptorch.DataLoader`: combined batches for a wrapped model, one contiguous part of the data per process (1.9)."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional, Sized, cast

import torch
from torch.utils.data import IterableDataset

from poptorch._errors import Error
from poptorch._log import logger
from poptorch.enums import DataLoaderMode
from poptorch.options import Options

from .partition import Partition


class DataLoader(torch.utils.data.DataLoader):  # type: ignore[type-arg]  # not generic at run time in old torch
    """Yields what `dataset` gives, collated to tensors whose dimension 0 is `combinedBatchSize`.

    combinedBatchSize = batch_size x device iterations x (replication factor // input group size) x accumulation.
    With several processes each reads its own contiguous part; with `shuffle` the parts move at every `iter(loader)`, so
    that all processes must begin the same number of epochs. `options` are frozen.

    Raises:
        AssertionError: shuffle in several processes without `options.randomSeed`; an IterableDataset or
            `batch_size=None` with several processes and automatic partitioning.
        ZeroDivisionError: fewer samples than one combined batch for each process.
        poptorch.Error: arguments that exclude one another; a mode that this version has not.
    """

    def __init__(  # noqa: PLR0913  # the SDK's signature
        self,
        options: Options,
        dataset: Any,
        batch_size: Optional[int] = 1,
        shuffle: Optional[bool] = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: Optional[bool] = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        async_options: Optional[Dict[str, Any]] = None,
        rebatched_worker_size: Optional[int] = None,
        batch_sampler: Any = None,
        **kwargs: Any,
    ) -> None:
        if mode != DataLoaderMode.Sync:
            raise Error(f"DataLoaderMode.{DataLoaderMode(mode).name} is not available in this version: use Sync")
        options._freeze()
        self._poptorch_options = options
        self._has_options = batch_size is not None
        self._batches_to_combine = _batches_to_combine(options)
        self._combined = None if batch_size is None else batch_size * self._batches_to_combine
        is_partitioned = options.Distributed.numProcesses > 1 and auto_distributed_partitioning
        batching = _batching(self._combined, drop_last)
        if batch_sampler is not None:
            _check_batch_sampler(batch_size, shuffle, is_partitioned)
            self._combined = _combined_by(batch_sampler, self._batches_to_combine)
            combined = CombinedBatchSampler(batch_sampler, self._batches_to_combine, drop_last)
            batching = {"batch_sampler": combined}
        elif isinstance(dataset, IterableDataset):
            _check_iterable(is_partitioned, num_workers, kwargs)
        else:
            _warn_of_short_batch(dataset, self._combined, drop_last)
        self._partition: Optional[Partition] = None
        if is_partitioned and batch_sampler is None:
            self._partition = dataset = _partition(options, dataset, self._combined, drop_last, shuffle)
            shuffle = False
        super().__init__(
            dataset,
            shuffle=shuffle,
            num_workers=num_workers,
            persistent_workers=num_workers > 0 if persistent_workers is None else persistent_workers,
            **batching,
            **kwargs,
        )

    @property
    def combinedBatchSize(self) -> Optional[int]:
        """Samples per call; None when the data set makes the batches itself."""
        return self._combined

    @property
    def options(self) -> Options:
        """The frozen options. AttributeError when `batch_size` is None, as in the SDK."""
        if not self._has_options:
            raise AttributeError("The loader has no options: with batch_size=None it combines nothing")
        return self._poptorch_options

    def terminate(self) -> None:
        """End asynchronous loading: in mode Sync there is none."""

    def __iter__(self) -> Any:
        if self._partition is not None:
            self._partition.shuffle()
        return super().__iter__()


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


def _batches_to_combine(options: Options) -> int:
    input_groups = options.replication_factor // options.input_group_size
    steps = options.device_iterations * options.Training.gradient_accumulation
    return int(steps * input_groups)


def _batching(combined: Optional[int], drop_last: bool) -> Dict[str, Any]:
    # Without automatic batching torch admits no drop_last.
    return {"batch_size": combined, "drop_last": drop_last and combined is not None}


def _check_batch_sampler(batch_size: Optional[int], shuffle: Optional[bool], is_partitioned: bool) -> None:
    if batch_size != 1 or shuffle:
        raise Error("batch_sampler excludes batch_size and shuffle: the sampler decides on both")
    if is_partitioned:
        raise Error(
            "batch_sampler excludes automatic partitioning over several processes: shard in the sampler and pass "
            "auto_distributed_partitioning=False"
        )


def _combined_by(batch_sampler: Any, batches_to_combine: int) -> Optional[int]:
    size = getattr(batch_sampler, "batch_size", None)
    return None if size is None else int(size) * batches_to_combine


def _check_iterable(is_partitioned: bool, num_workers: int, kwargs: Dict[str, Any]) -> None:
    assert not is_partitioned, (
        "An IterableDataset cannot be partitioned over processes: shard it yourself and pass "
        "auto_distributed_partitioning=False"
    )
    if num_workers > 1 and kwargs.get("worker_init_fn") is None:
        logger.warning("An IterableDataset with %d workers and no worker_init_fn yields its data twice", num_workers)


def _warn_of_short_batch(dataset: Any, combined: Optional[int], drop_last: bool) -> None:
    if combined is not None and not drop_last and len(dataset) % combined:
        logger.warning(
            "%d samples are no multiple of the combined batch size %d: the last batch is short, and a compiled model "
            "will refuse it",
            len(dataset),
            combined,
        )


def _partition(
    options: Options, dataset: Any, combined: Optional[int], drop_last: bool, shuffle: Optional[bool]
) -> Partition:
    assert combined is not None, (
        "batch_size=None combines no batches, so the data cannot be partitioned over processes: shard it yourself and "
        "pass auto_distributed_partitioning=False"
    )
    has_seed = options.exists("random_seed")
    assert has_seed or not shuffle, "Shuffling in several processes needs the same options.randomSeed(...) in all"
    return Partition(
        dataset,
        step=combined,
        process_id=options.Distributed.processId,
        num_processes=options.Distributed.numProcesses,
        drop_last=drop_last,
        seed=options.random_seed if shuffle else None,
    )
