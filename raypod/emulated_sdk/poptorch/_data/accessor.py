"""`poptorch.AsynchronousDataAccessor`: data that another process loads ahead (contract 1.9)."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, List, Optional, Sized, cast

import torch

from poptorch._data.fetcher import Ready, Settings
from poptorch._data.fetcher_process import FetcherProcess
from poptorch._data.ring import END, WHOLE, Entry, map_slots
from poptorch._errors import Error
from poptorch.enums import SharingStrategy


class AsynchronousDataAccessor:
    """Iterates over `dataset` in another process, which fills a ring buffer in shared memory.

    What an iteration yields are VIEWS of the ring buffer, valid until the next `next()`: clone what is to be kept.
    Elements are tensors, flat tuples, lists or dictionaries of tensors, or values of a type with a registered parser;
    all have the dtypes and shapes of the first, but for a shorter dimension 0. An iteration that follows a `break`
    begins a new epoch. The constructor returns when the first element is loaded. Waits end with data, and at the latest
    when the other process does.

    dataset: a `poptorch.DataLoader`, or anything that can be iterated or indexed and that the process can receive.
    buffer_size: elements in the ring.
    miss_sleep_time_in_ms: accepted; waiting is ended by events, not looked into at intervals.
    load_indefinitely: prefetch the next epoch at the end of one.
    early_preload: fill the ring before the first iteration begins; without, one element.
    sharing_strategy: how the data set gets there. All but Fork pickle it and need `if __name__ == "__main__":`.
    rebatched_size: join the elements along dimension 0 and yield so many samples at a time; a short rest is dropped
        unless a `poptorch.DataLoader` has `drop_last=False`.

    Raises:
        poptorch.Error: a loader that is asynchronous already; one with `drop_last=False` that combines batches, without
            `rebatched_size`; a `rebatched_size` below 2; a data set that cannot be sent.
        AssertionError and poptorch.Error in one, "An error occurred in the data fetcher": from here and from `next()`,
            with the traceback; also for an empty data set, and when the process was killed.
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
        is_size = isinstance(buffer_size, int) and buffer_size > 0
        assert is_size, f"buffer_size must be at least 1, got {buffer_size!r}"
        is_time = isinstance(miss_sleep_time_in_ms, (int, float)) and not miss_sleep_time_in_ms < 0
        assert is_time, f"miss_sleep_time_in_ms is a number of milliseconds, got {miss_sleep_time_in_ms!r}"
        _check_source(dataset, rebatched_size)
        drop_last = bool(getattr(dataset, "rebatched_drop_last", True))
        self._dataset = _as_sent(dataset)
        self._settings = Settings(buffer_size, load_indefinitely, early_preload, rebatched_size, drop_last)
        self._fetcher = FetcherProcess(self._dataset, self._settings, SharingStrategy(sharing_strategy))
        try:
            self._ready: Ready = self._fetcher.wait_until_ready()
            self._slots = map_slots(self._fetcher.memory, self._ready.layout, buffer_size)
        except BaseException:
            self.terminate()
            raise
        self._epoch = 1
        self._is_begun = False  # whether this epoch gave anything yet
        self._has_ended = False
        self._is_held = False  # whether the oldest entry is the one that was given last

    def terminate(self) -> None:
        """End the other process; what was given stays readable, nothing more comes. Also done on deletion and exit."""
        if self._fetcher is not None:
            self._fetcher.stop()
            self._fetcher = None

    def __del__(self) -> None:
        # At the very end of the interpreter what it takes may be gone; the process was ended at exit.
        with contextlib.suppress(TypeError, AttributeError):
            self.terminate()

    def __len__(self) -> int:
        """Elements of an epoch. TypeError when the data set has no length."""
        size = self._settings.rebatched_size
        if size is None:
            return len(cast(Sized, self._dataset))
        samples = _count_samples(self._dataset)
        return samples // size if self._settings.drop_last else -(-samples // size)

    def __iter__(self) -> AsynchronousDataAccessor:
        """Begin an epoch; one that was begun and not read to its end is abandoned. Error after `terminate()`."""
        fetcher = self._running()
        if self._is_begun:
            self._epoch += 1
            self._is_begun = self._has_ended = False
        fetcher.board.wanted_epoch = self._epoch
        fetcher.announce()
        return self

    def __next__(self) -> Any:
        """The next element, whose tensors are views that the following `next()` invalidates."""
        fetcher = self._running()
        if self._has_ended:
            raise StopIteration
        if fetcher.board.wanted_epoch < self._epoch:
            iter(self)
        self._release(fetcher)
        entry = self._wait_for_entry(fetcher)
        self._is_begun = self._is_held = True
        if entry.rows == END:
            self._has_ended = True
            self._release(fetcher)
            raise StopIteration
        return self._ready.kind.build(self._views(entry))

    def _running(self) -> FetcherProcess:
        if self._fetcher is None:
            raise Error("The asynchronous data accessor was terminated: make a new one to load more")
        return self._fetcher

    def _wait_for_entry(self, fetcher: FetcherProcess) -> Entry:
        entry = self._look(fetcher)
        while entry is None:
            fetcher.wait_for_data()
            entry = self._look(fetcher)
            if entry is None:
                failure = fetcher.failure()
                # It may have published something just before it failed.
                entry = self._look(fetcher)
                if entry is None and failure is not None:
                    raise failure
        return entry

    def _look(self, fetcher: FetcherProcess) -> Optional[Entry]:
        """The oldest entry of this epoch, if it is there; those of abandoned epochs are passed over."""
        board = fetcher.board
        while board.taken < board.published:
            entry = board.entry(board.taken)
            if entry.epoch == self._epoch:
                return entry
            self._is_held = True
            self._release(fetcher)
        return None

    def _release(self, fetcher: FetcherProcess) -> None:
        if self._is_held:
            # In this order an interruption repeats an element rather than lose one.
            self._is_held = False
            fetcher.board.taken += 1
            fetcher.announce()

    def _views(self, entry: Entry) -> List[torch.Tensor]:
        slot = self._slots[entry.slot]
        return [tensor.detach() if entry.rows == WHOLE else tensor[: entry.rows] for tensor in slot]


def _check_source(dataset: Any, rebatched_size: Optional[int]) -> None:
    if getattr(dataset, "is_asynchronous", False):
        raise Error("The data loader loads asynchronously already (DataLoaderMode): iterate over the loader itself")
    if rebatched_size is not None and (not isinstance(rebatched_size, int) or rebatched_size < 2):
        raise Error(f"rebatched_size must be None or an integer greater than 1, got {rebatched_size!r}")
    combined = getattr(dataset, "combinedBatchSize", None)
    if rebatched_size is None and combined is not None and combined > 1 and not dataset.rebatched_drop_last:
        raise Error(
            f"A loader with drop_last=False that combines {combined} samples needs rebatched_size={combined}: the last "
            "batch does not fill a slot of the ring buffer"
        )


def _as_sent(dataset: Any) -> Any:
    """The data set as another process can receive it: a loader without its workers."""
    if not isinstance(dataset, torch.utils.data.DataLoader):
        return dataset
    loader = copy.copy(dataset)
    vars(loader)["_iterator"] = None
    return loader


def _count_samples(dataset: Any) -> int:
    """Samples of an epoch of a loader, or elements of another data set."""
    if not isinstance(dataset, torch.utils.data.DataLoader) or dataset.batch_size is None:
        sampler = getattr(dataset, "batch_sampler", None)
        return len(dataset) * int(getattr(sampler, "batch_size", 1))
    if dataset.drop_last:
        return len(dataset) * dataset.batch_size
    is_stream = isinstance(dataset.dataset, torch.utils.data.IterableDataset)
    return len(cast(Sized, dataset.dataset if is_stream else dataset.sampler))
