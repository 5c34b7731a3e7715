"""`poptorch.DataLoader`: combined batches for a wrapped model, from one contiguous part of the data per process."""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch
from torch.utils.data import IterableDataset

from poptorch.data.accessor import AsynchronousDataAccessor
from poptorch.data.fetcher import CombinedBatches
from poptorch.enums import DataLoaderMode
from poptorch.environment import logger
from poptorch.errors import Error
from poptorch.options import Options


class DataLoader(torch.utils.data.DataLoader):  # type: ignore[type-arg]  # not generic at run time in old torch
    """Yields the samples of `dataset`, collated to tensors whose dimension 0 is `combinedBatchSize`.

    combinedBatchSize = batch_size x device iterations x (replication factor // input group size) x accumulation.
    Each of several processes reads its own contiguous part. With `shuffle` the parts move at every `iter(loader)`, so
    all processes must start the same number of epochs; persistent workers keep the part of their first epoch. The
    constructor freezes `options`.

    Args:
        mode: Sync loads in this process and in `num_workers` worker processes. Async loads in a data fetcher process,
            which starts the workers and shuffles; it takes the arguments `async_options` of
            `AsynchronousDataAccessor`, and a batch is valid until the next `next()`. In AsyncRebatched the workers make
            batches of `rebatched_worker_size` samples, which the data fetcher joins to combined batches. Async with
            `drop_last=False` and combined batches is AsyncRebatched.
        rebatched_worker_size: by default the combined batch size, as in the SDK; no effect unless batches are joined.
        batch_sampler: `collate_fn` collates each of its batches; as many as a call needs are then concatenated.

    Raises:
        AssertionError: shuffle in several processes without `options.randomSeed`; an IterableDataset or
            `batch_size=None` with several processes and automatic partitioning; `options` of another type.
        ValueError: an argument that torch's data loader rejects, such as a `batch_size` below 1; an unknown mode.
        ZeroDivisionError: fewer samples than one combined batch per process.
        poptorch.Error: conflicting arguments, and the errors of `AsynchronousDataAccessor`.
    """

    batches_to_combine = 1  # batches of torch's data loader that are concatenated
    _accessor: Optional[AsynchronousDataAccessor] = None
    _partition: Optional[Partition] = None

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
        assert isinstance(options, Options), f"The first argument must be a poptorch.Options, not {options!r}"
        mode = DataLoaderMode(mode)
        _check_batch_size(batch_size, drop_last, batch_sampler)
        options._freeze()
        self._poptorch_options, self._has_options = options, batch_size is not None
        to_combine = _batches_to_combine(options)
        is_partitioned = options.Distributed.numProcesses > 1 and auto_distributed_partitioning
        if batch_sampler is not None:
            _check_batch_sampler(batch_size, shuffle, is_partitioned)
        self._combined = _combined_size(batch_size, batch_sampler, to_combine)
        self.rebatched_drop_last = drop_last
        rebatched_size = _rebatched_size(mode, self._combined, drop_last, batch_size)
        _check_async(mode, async_options, rebatched_size, rebatched_worker_size)
        _check_iterable(dataset, is_partitioned, num_workers, kwargs)
        if is_partitioned and batch_sampler is None:
            self._partition = dataset = _partition(options, dataset, self._combined, drop_last, shuffle)
            shuffle = False
        if batch_sampler is None:
            _warn_if_short(dataset, self._combined, drop_last)
            batching = _batching(self._combined, drop_last, rebatched_size, rebatched_worker_size)
        else:
            batching = {"batch_sampler": batch_sampler}
            self.batches_to_combine = to_combine if rebatched_size is None else 1
        super().__init__(
            dataset,
            shuffle=shuffle,
            num_workers=num_workers,
            persistent_workers=num_workers > 0 if persistent_workers is None else persistent_workers,
            **batching,
            **kwargs,
        )
        if mode != DataLoaderMode.Sync:
            rebatching = {} if rebatched_size is None else {"rebatched_size": rebatched_size}
            self._accessor = AsynchronousDataAccessor(self, **{**(async_options or {}), **rebatching})

    @property
    def combinedBatchSize(self) -> Optional[int]:
        """Samples per call; None if the data set makes the batches."""
        return self._combined

    @property
    def _combined_batch_size(self) -> Optional[int]:
        return self._combined  # published programs read the SDK's attribute

    @property
    def options(self) -> Options:
        """The frozen options; AttributeError if `batch_size` is None, as in the SDK."""
        if not self._has_options:
            raise AttributeError("The loader has no options: with batch_size=None it does not combine batches")
        return self._poptorch_options

    @property
    def is_asynchronous(self) -> bool:
        """Whether a data fetcher process loads the data."""
        return self._accessor is not None

    def terminate(self) -> None:
        """Stop the data fetcher process; later iterations raise Error. No effect in mode Sync."""
        if self._accessor is not None:
            self._accessor.terminate()

    def __len__(self) -> int:
        """Return the number of combined batches of an epoch; with a `batch_sampler`, its number of batches."""
        return super().__len__() if self._accessor is None else len(self._accessor)

    def __iter__(self) -> Any:
        if self._accessor is not None:
            return iter(self._accessor)
        if self._partition is not None:
            self._partition.shuffle()
        if self.batches_to_combine > 1:
            return iter(CombinedBatches(super().__iter__(), self.batches_to_combine, self.rebatched_drop_last))
        return super().__iter__()

    def __getstate__(self) -> Dict[str, Any]:
        # A copy in another process starts its own workers there.
        return {**self.__dict__, "_accessor": None, "_iterator": None}


def _batches_to_combine(options: Options) -> int:
    input_groups = options.replication_factor // options.input_group_size
    steps = options.device_iterations * options.Training.gradient_accumulation
    return int(steps * input_groups)


def _check_batch_size(batch_size: Optional[int], drop_last: bool, batch_sampler: Any) -> None:
    # Here, as torch gets only the combined batch size.
    is_integer = isinstance(batch_size, int) and not isinstance(batch_size, bool)
    if batch_size is not None and not (is_integer and batch_size > 0):
        raise ValueError(f"batch_size must be a positive integer or None, got {batch_size!r}")
    if not isinstance(drop_last, bool):
        raise ValueError(f"drop_last must be a bool, got {drop_last!r}")
    if batch_size is None and batch_sampler is None and drop_last:
        raise ValueError("batch_size=None makes no batches, so it excludes drop_last: pass drop_last=False")


def _rebatched_size(
    mode: DataLoaderMode, combined: Optional[int], drop_last: bool, batch_size: Optional[int]
) -> Optional[int]:
    """Return the size to which the workers' batches are joined; None if they are not joined."""
    if mode == DataLoaderMode.AsyncRebatched and combined is None:
        raise Error(
            "DataLoaderMode.AsyncRebatched needs a batch size: pass "
            + ("batch_size" if batch_size is None else "a batch_sampler with the attribute batch_size")
        )
    assert mode != DataLoaderMode.AsyncRebatched or combined != 1, "DataLoaderMode.AsyncRebatched needs several samples"
    is_rebatched = mode == DataLoaderMode.AsyncRebatched or (mode == DataLoaderMode.Async and not drop_last)
    return combined if is_rebatched and combined is not None and combined > 1 else None


def _batching(
    combined: Optional[int], drop_last: bool, rebatched: Optional[int], worker_size: Optional[int]
) -> Dict[str, Any]:
    """Return the arguments of torch's data loader without a batch sampler."""
    size = combined if rebatched is None else worker_size or rebatched
    return {"batch_size": size, "drop_last": drop_last and rebatched is None}


def _check_async(
    mode: DataLoaderMode, async_options: Optional[Dict[str, Any]], rebatched: Optional[int], worker_size: Optional[int]
) -> None:
    if mode != DataLoaderMode.Sync and "rebatched_size" in (async_options or {}):
        raise Error(f"rebatched_size in async_options: omit it, the mode {mode.name} sets it to {rebatched}")
    # Other modes ignore it, as programs pass it in every mode.
    if (mode == DataLoaderMode.AsyncRebatched or rebatched is not None) and worker_size is not None:
        most = 1 if rebatched is None else rebatched
        is_size = isinstance(worker_size, int) and 0 < worker_size <= most
        assert is_size, f"rebatched_worker_size must be from 1 to the combined batch size {most}, got {worker_size!r}"


def _check_batch_sampler(batch_size: Optional[int], shuffle: Optional[bool], is_partitioned: bool) -> None:
    if batch_size != 1 or shuffle:
        raise Error("batch_sampler excludes batch_size and shuffle: the sampler determines both")
    if is_partitioned:
        raise Error(
            "batch_sampler excludes automatic partitioning over several processes: shard in the sampler and pass "
            "auto_distributed_partitioning=False"
        )


def _combined_size(batch_size: Optional[int], batch_sampler: Any, to_combine: int) -> Optional[int]:
    size = batch_size if batch_sampler is None else getattr(batch_sampler, "batch_size", None)
    return None if size is None else int(size) * to_combine


def _check_iterable(dataset: Any, is_partitioned: bool, num_workers: int, kwargs: Dict[str, Any]) -> None:
    if not isinstance(dataset, IterableDataset):
        return
    assert not is_partitioned, (
        "An IterableDataset cannot be partitioned over processes: shard it yourself and pass "
        "auto_distributed_partitioning=False"
    )
    if num_workers > 1 and kwargs.get("worker_init_fn") is None:
        logger.warning(
            "An IterableDataset with %d workers and no worker_init_fn yields its data %d times",
            num_workers,
            num_workers,
        )


def _warn_if_short(dataset: Any, combined: Optional[int], drop_last: bool) -> None:
    """Warn if the last batch of `dataset`, this process's part, is short."""
    if drop_last or combined is None or isinstance(dataset, IterableDataset):
        return
    if len(dataset) % combined:
        logger.warning(
            "%d samples are not a multiple of the combined batch size %d: the last batch is short, and a compiled "
            "model raises an error for it",
            len(dataset),
            combined,
        )


def _partition(
    options: Options, dataset: Any, combined: Optional[int], drop_last: bool, shuffle: Optional[bool]
) -> Partition:
    assert combined is not None, (
        "With batch_size=None the data cannot be partitioned over processes: shard it yourself and pass "
        "auto_distributed_partitioning=False"
    )
    has_seed = options.exists("random_seed")
    assert has_seed or not shuffle, "Shuffling in several processes needs the same options.randomSeed(...) in each"
    return Partition(
        dataset,
        step=combined,
        process_id=options.Distributed.processId,
        num_processes=options.Distributed.numProcesses,
        drop_last=drop_last,
        seed=options.random_seed if shuffle else None,
    )


class Partition(torch.utils.data.Dataset):  # type: ignore[type-arg]  # not generic at run time in old torch
    """The contiguous window of a map-style data set that belongs to one process.

    With `drop_last` every process has the same number of steps. Without, each of the first
    `len(dataset) % num_processes` processes has one sample more.

    Args:
        dataset: the WHOLE data set, in every process.
        step: samples that one process reads per call.
        seed: seed of the permutations of `shuffle`; None for the order of the data set.

    Raises:
        ZeroDivisionError: with `drop_last`, there is no whole step for each process, as in the SDK.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        step: int,
        process_id: int,
        num_processes: int,
        drop_last: bool,
        seed: Optional[int],
    ) -> None:
        total = len(dataset)
        if drop_last:
            self._length = step * (total // (step * num_processes))
            self._base = process_id * self._length
            self._leftovers = total % self._length
        else:
            share, more = divmod(total, num_processes)
            self._length = share + (process_id < more)
            self._base = process_id * share + min(process_id, more)
            self._leftovers = 0
        self._dataset = dataset
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._offset = self._base
        # In shared memory, so that persistent workers read each epoch's order. As in the SDK, the offset is not: their
        # window stays that of the epoch in which they start.
        self._order = None if seed is None else _shared(torch.arange(total))

    def shuffle(self) -> None:
        """Start an epoch: draw a permutation of the whole data set, and shift the window by the leftovers or back.

        The generator is seeded once, so all processes draw the same permutations.
        """
        if self._order is not None:
            self._order.copy_(torch.randperm(len(self._order), generator=self._generator))
            self._offset = self._base + self._leftovers if self._offset == self._base else self._base

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        # Not limited to the length, as in the SDK: a program may bring a sampler of the whole data set.
        position = self._offset + index
        return self._dataset[position if self._order is None else int(self._order[position])]

    def unshare(self) -> None:
        """Stop sharing the order with the process that this copy comes from. Workers started later share it."""
        if self._order is not None:
            self._order = _shared(self._order.clone())

    def __getstate__(self) -> Any:
        # torch 2.0 cannot pickle a generator, and its state as a tensor would be sent as a file descriptor that may be
        # closed before the receiving process has opened it.
        state = None if self._generator is None else self._generator.get_state().numpy().tobytes()
        return {**self.__dict__, "_generator": state}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["_generator"] is not None:
            self._generator = torch.Generator()
            self._generator.set_state(torch.frombuffer(bytearray(state["_generator"]), dtype=torch.uint8))


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor
