"""`poptorch.AsynchronousDataAccessor`: loads data ahead in another process."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, List, Optional, Sized, cast

import torch

from poptorch.data.fetcher import Ready, Settings
from poptorch.data.fetcher_process import FetcherProcess
from poptorch.data.ring import END, WHOLE, Entry, map_slots
from poptorch.enums import SharingStrategy
from poptorch.errors import DataFetcherError, Error


class AsynchronousDataAccessor:
    """Iterates over `dataset` in another process, which fills a ring buffer in shared memory.

    It yields VIEWS of the ring buffer that are valid until the next `next()`: clone what must last longer. Elements are
    tensors, flat tuples, lists or dictionaries of tensors, or values of a type with a registered parser. All get the
    dtypes and shapes of the first: as in PopTorch, a batch of one sample is repeated to its size, and another smaller
    one is an error. An iteration after a `break` starts a new epoch. The constructor returns when the first element is
    loaded. Waits end at the latest when the process exits.

    Args:
        dataset: a `poptorch.DataLoader`, or any iterable or indexable object. An IndexError ends the epoch of the
            latter, not its length.
        buffer_size: number of elements in the ring buffer.
        miss_sleep_time_in_ms: validated only; a wait ends by an event, without polling intervals.
        load_indefinitely: prefetch the next epoch at the end of one.
        early_preload: fill the ring buffer before the first iteration starts, instead of one element.
        sharing_strategy: how the data set is sent to the process. All but Fork pickle it and need
            `if __name__ == "__main__":` in the program.
        rebatched_size: join elements, whose first has at most that many samples, along dimension 0 and yield this
            many at a time. A shorter last element is dropped unless the data set is a `poptorch.DataLoader` with
            `drop_last=False`.

    Raises:
        poptorch.Error: the loader is already asynchronous; it combines batches with `drop_last=False`, and
            `rebatched_size` is not given; `rebatched_size` is less than 2; the data set cannot be pickled.
        AssertionError and poptorch.Error: "An error occurred in the data fetcher", with the traceback, here and in
            `next()`; also if the data set is empty or the process was killed.
    """

    _fetcher: Optional[FetcherProcess] = None

    def __init__(
        self,
        dataset: Any,
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy = SharingStrategy.ForkServer,
        rebatched_size: Optional[int] = None,
    ) -> None:
        is_size = isinstance(buffer_size, int) and not isinstance(buffer_size, bool) and buffer_size > 0
        assert is_size, f"buffer_size must be at least 1, got {buffer_size!r}"
        is_time = isinstance(miss_sleep_time_in_ms, (int, float)) and not miss_sleep_time_in_ms < 0
        assert is_time, f"miss_sleep_time_in_ms must be a number of milliseconds, got {miss_sleep_time_in_ms!r}"
        _check_source(dataset, rebatched_size)
        drop_last = bool(getattr(dataset, "rebatched_drop_last", True))
        self._dataset = _without_workers(dataset)
        self._settings = Settings(buffer_size, load_indefinitely, early_preload, rebatched_size, drop_last)
        self._fetcher = FetcherProcess(self._dataset, self._settings, SharingStrategy(sharing_strategy))
        try:
            self._ready: Ready = self._fetcher.wait_until_ready()
            self._slots = map_slots(self._fetcher.memory, self._ready.layout, buffer_size)
        except BaseException:
            self.terminate()
            raise
        self._epoch = 1
        self._has_started = False  # whether this epoch has yielded anything
        self._has_ended = False
        self._is_held = False  # whether the caller holds the oldest entry

    def terminate(self) -> None:
        """Stop the process. The last element stays readable. Called on deletion and at exit."""
        if self._fetcher is not None:
            self._fetcher.stop()
            self._fetcher = None

    def __del__(self) -> None:
        # During interpreter shutdown modules may be gone; the exit function has stopped the process.
        with contextlib.suppress(TypeError, AttributeError):
            self.terminate()

    def __len__(self) -> int:
        """Return the number of elements of an epoch; TypeError if the data set has no length."""
        size = self._settings.rebatched_size
        if size is None:
            return len(cast(Sized, self._dataset))
        samples = _count_samples(self._dataset)
        return samples // size if self._settings.drop_last else -(-samples // size)

    def __iter__(self) -> AsynchronousDataAccessor:
        """Start an epoch and abandon an unfinished one; Error after `terminate()`."""
        fetcher = self._running()
        if self._has_started:
            self._epoch += 1
            self._has_started = self._has_ended = False
        fetcher.header.requested_epoch = self._epoch
        fetcher.wake()
        return self

    def __next__(self) -> Any:
        """Return the next element, whose tensors are views that the following `next()` invalidates."""
        fetcher = self._running()
        if self._has_ended:
            raise StopIteration
        if fetcher.header.requested_epoch < self._epoch:
            iter(self)
        self._release(fetcher)
        entry = self._wait_for_entry(fetcher)
        self._has_started = self._is_held = True
        if entry.rows == END:
            self._has_ended = True
            self._release(fetcher)
            raise StopIteration
        return self._ready.spec.unflatten(self._views(entry))

    def _running(self) -> FetcherProcess:
        if self._fetcher is None:
            raise DataFetcherError("The asynchronous data accessor was terminated: create a new one to load more data")
        return self._fetcher

    def _wait_for_entry(self, fetcher: FetcherProcess) -> Entry:
        entry = self._oldest_entry(fetcher)
        while entry is None:
            fetcher.wait_for_data()
            entry = self._oldest_entry(fetcher)
            if entry is None:
                failure = fetcher.failure()
                # It may have published an entry just before it failed.
                entry = self._oldest_entry(fetcher)
                if entry is None and failure is not None:
                    raise failure
        return entry

    def _oldest_entry(self, fetcher: FetcherProcess) -> Optional[Entry]:
        """Release the entries of abandoned epochs and return the oldest one of this epoch; None if there is none."""
        header = fetcher.header
        while header.consumed < header.published:
            entry = header.entry(header.consumed)
            if entry.epoch == self._epoch:
                return entry
            self._is_held = True
            self._release(fetcher)
        return None

    def _release(self, fetcher: FetcherProcess) -> None:
        if self._is_held:
            # In this order an interruption repeats an element instead of losing one.
            self._is_held = False
            fetcher.header.consumed += 1
            fetcher.wake()

    def _views(self, entry: Entry) -> List[torch.Tensor]:
        slot = self._slots[entry.slot]
        return [tensor.detach() if entry.rows == WHOLE else tensor[: entry.rows] for tensor in slot]


def _check_source(dataset: Any, rebatched_size: Optional[int]) -> None:
    if getattr(dataset, "is_asynchronous", False):
        raise Error("The data loader is already asynchronous (DataLoaderMode): iterate over the loader itself")
    if rebatched_size is not None and (not isinstance(rebatched_size, int) or rebatched_size < 2):
        raise DataFetcherError(f"rebatched_size must be None or an integer greater than 1, got {rebatched_size!r}")
    combined = getattr(dataset, "combinedBatchSize", None)
    if rebatched_size is None and combined is not None and combined > 1 and not dataset.rebatched_drop_last:
        raise DataFetcherError(
            f"A loader with drop_last=False that combines {combined} samples needs rebatched_size={combined}: the last "
            "batch may not fill a slot of the ring buffer"
        )


def _without_workers(dataset: Any) -> Any:
    """Return a loader without its worker processes, which cannot be pickled; another data set unchanged."""
    if not isinstance(dataset, torch.utils.data.DataLoader):
        return dataset
    loader = copy.copy(dataset)
    vars(loader)["_iterator"] = None
    return loader


def _count_samples(dataset: Any) -> int:
    """Return the number of samples of an epoch of a loader, or of elements of another data set."""
    if not isinstance(dataset, torch.utils.data.DataLoader) or dataset.batch_size is None:
        sampler = getattr(dataset, "batch_sampler", None)
        return len(dataset) * int(getattr(sampler, "batch_size", 1))
    if dataset.drop_last:
        return len(dataset) * dataset.batch_size
    is_stream = isinstance(dataset.dataset, torch.utils.data.IterableDataset)
    return len(cast(Sized, dataset.dataset if is_stream else dataset.sampler))
