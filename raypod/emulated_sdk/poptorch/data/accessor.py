"""`poptorch.AsynchronousDataAccessor` loads data ahead in a process that it starts, monitors and stops."""

from __future__ import annotations

import atexit
import contextlib
import copy
import multiprocessing
import multiprocessing.util  # registers its exit function, which joins children, before ours
import os
import pickle
import signal
import weakref
from multiprocessing import forkserver
from typing import Any, List, Optional, Sized, cast

import torch

from poptorch.data import fetcher
from poptorch.data.fetcher import Ready, Settings
from poptorch.data.ring import END, WHOLE, Entry, Event, RingHeader, SharedMemory, map_slots
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


_METHODS = {
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
}
_NOT_STARTED = "The worker thread failed to start. "
_POLL_INTERVAL_S = 0.1  # a waiting reader checks this often whether the fetcher is alive
_GRACE_S = 10.0  # timeout of each step of a shutdown


class FetcherProcess:
    """A running data fetcher. Only the process that created it stops it, at its exit at the latest.

    Raises:
        Error: the data set cannot be pickled.
    """

    def __init__(self, dataset: Any, settings: fetcher.Settings, strategy: SharingStrategy) -> None:
        self._owner = os.getpid()
        self._failure: Optional[DataFetcherError] = None
        self.memory = SharedMemory.create(RingHeader.size(settings.slots))
        self.header = RingHeader(self.memory, settings.slots)
        self._data_ready, self._slot_free = Event.create(), Event.create()
        context: Any = multiprocessing.get_context(_METHODS[strategy])
        self._reports, sender = context.Pipe(duplex=False)
        channels = fetcher.Channels(self.memory, self._data_ready, self._slot_free, sender)
        self._process: Any = None
        try:
            self._process = _start(context, strategy, channels, settings, dataset)
        finally:
            sender.close()
            if self._process is None:
                self._close()
        _running.add(self)

    def wait_until_ready(self) -> fetcher.Ready:
        """Wait for the first element; DataFetcherError if the fetcher fails or exits first."""
        while not self._reports.poll(_POLL_INTERVAL_S):
            if not self._process.is_alive() and not self._reports.poll():
                raise self._exited(_NOT_STARTED)
        report = self._receive()
        if isinstance(report, fetcher.Ready):
            return report
        raise self._failed(report, _NOT_STARTED)

    def wait_for_data(self) -> None:
        """Wait until the fetcher publishes an entry or fails, at most 0.1 s."""
        self._data_ready.wait(_POLL_INTERVAL_S)

    def wake(self) -> None:
        """Wake the fetcher after a slot was released or an epoch requested."""
        self._slot_free.set()

    def failure(self) -> Optional[DataFetcherError]:
        """Return why the fetcher has ended; None while it runs. Entries that it published before stay readable."""
        if self._failure is None:
            # In this order, as a report is sent before the exit.
            is_alive = self._process.is_alive()
            if self._reports.poll():
                self._failure = self._failed(self._receive())
            elif not is_alive:
                self._failure = self._exited()
        return self._failure

    def stop(self) -> None:
        """Stop the process: by request, which it checks between two elements, then by signals, after 10 s each."""
        if self._process is None or os.getpid() != self._owner:
            return
        self.header.stop()
        self._slot_free.set()
        for step in (self._interrupt, self._process.terminate, self._process.kill):
            if self._has_ended():
                break
            step()
        self._process.join(_GRACE_S)
        self._process = None
        self._close()

    def _interrupt(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just exited
            os.kill(self._process.pid, signal.SIGINT)

    def _has_ended(self) -> bool:
        self._process.join(_GRACE_S)
        return not self._process.is_alive()

    def _receive(self) -> Any:
        try:
            return pickle.loads(self._reports.recv_bytes())
        except EOFError:
            return None

    def _failed(self, report: Optional[fetcher.Failure], prefix: str = "") -> DataFetcherError:
        if report is None:
            return self._exited(prefix)
        return DataFetcherError(f"{prefix}An error occurred in the data fetcher:\n{report.message}")

    def _exited(self, prefix: str = "") -> DataFetcherError:
        self._process.join(_GRACE_S)
        return DataFetcherError(
            f"{prefix}An error occurred in the data fetcher: process {self._process.pid} ended with exit code "
            f"{self._process.exitcode} (negative: killed by that signal). If it failed to start, its error is above: a "
            'program that loads asynchronously needs `if __name__ == "__main__":`, or SharingStrategy.Fork'
        )

    def _close(self) -> None:
        self._reports.close()
        for shared in (self.memory, self._data_ready, self._slot_free):
            shared.close()


_running: weakref.WeakSet[FetcherProcess] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for process in list(_running):
        process.stop()


def _start(
    context: Any, strategy: SharingStrategy, channels: fetcher.Channels, settings: fetcher.Settings, dataset: Any
) -> Any:
    """Return the started process; Error if the data set cannot be pickled."""
    if strategy == SharingStrategy.ForkServer:
        # The fork server imports these modules once, for all fetchers. No effect if it runs already.
        forkserver.set_forkserver_preload(["__main__", "torch", "poptorch"])
    by_file = strategy == SharingStrategy.FileSystem
    try:
        try:
            return _start_process(context, channels, settings, dataset, by_file)
        except ValueError:
            # A fork server accepts a limited number of descriptors, and each tensor needs one: send a file instead.
            if strategy != SharingStrategy.ForkServer:
                raise
            return _start_process(context, channels, settings, dataset, by_file=True)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
        raise Error(
            f"Cannot send the data set to the data fetcher process ({type(error).__name__}: {error}): make it "
            f"picklable, or use another SharingStrategy than {strategy.name} (Fork pickles nothing)"
        ) from error


def _start_process(
    context: Any, channels: fetcher.Channels, settings: fetcher.Settings, dataset: Any, by_file: bool
) -> Any:
    state = fetcher.ProcessState.of_this_process()
    pickled = _pickle_to_file(dataset) if by_file else None
    try:
        arguments = (channels, settings, state, pickled, None if by_file else dataset)
        process = context.Process(target=fetcher.run, args=arguments, name="poptorch data fetcher")
        process.start()
    finally:
        if pickled is not None:
            pickled.close()
    return process


def _pickle_to_file(dataset: Any) -> SharedMemory:
    """Return an anonymous file with the pickled data set."""
    content = pickle.dumps(dataset)
    file = SharedMemory.create(len(content))
    with file.map() as target:
        target.write(content)
    return file
