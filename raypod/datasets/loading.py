"""What is prepared while a call runs, and how long a call waited for it nevertheless."""

from __future__ import annotations

import collections
import contextlib
import queue
import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Deque, Generator, Iterable, Iterator, List, Tuple, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader

from raypod.datasets.order import sample_seed

Item = TypeVar("Item")
Request = TypeVar("Request")
_GRACE_S = 1.0  # for the batch that is being made when nobody wants another one


def timed(batches: Iterator[Item]) -> Iterator[Tuple[Item, float]]:
    """Each batch, and the seconds that whoever asked for it waited."""
    with contextlib.ExitStack() as stack:
        close = getattr(batches, "close", None)  # generators have it: what they started ends with this one
        if close is not None:
            stack.callback(close)
        while True:
            asked_s = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch, time.monotonic() - asked_s


def prepared(
    make: Callable[[Request], Item], requests: Iterator[Request], workers: int, depth: int
) -> Generator[Item, None, None]:
    """What `make` gives for each request, in their order, `depth` of them ahead of the one that is asked for.

    `workers` threads make them, so `make` should spend its time outside of the interpreter lock. An error in it
    surfaces here, in its place.
    """
    pending: Deque[Future[Item]] = collections.deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="feed") as pool:
        try:
            for request in requests:
                pending.append(pool.submit(make, request))
                if len(pending) > depth:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def ahead(batches: Iterator[Item], depth: int, interrupt: Callable[[], None]) -> Iterator[Item]:
    """The same batches, up to `depth` of them prepared in a thread; an error there surfaces here, in its place.

    A batch that is still being made when nobody wants another one is interrupted, and the thread ends by itself.
    """
    slots: queue.Queue[Any] = queue.Queue(maxsize=depth)
    ended = threading.Event()

    def put(item: Any) -> bool:
        while not ended.is_set():
            with contextlib.suppress(queue.Full):
                slots.put(item, timeout=0.1)
                return True
        return False

    def fill() -> None:
        try:
            for batch in batches:
                if not put((batch, None)):
                    return
            put((None, None))
        except BaseException as error:  # noqa: BLE001 - handed over to the consumer, who raises it
            put((None, error))

    thread = threading.Thread(target=fill, name="feed-ahead", daemon=True)
    thread.start()
    try:
        while True:
            batch, error = slots.get()
            if error is not None:
                raise error
            if batch is None:
                return
            yield batch
    finally:
        ended.set()
        _end(thread, interrupt)


def _end(thread: threading.Thread, interrupt: Callable[[], None]) -> None:
    thread.join(_GRACE_S)
    if thread.is_alive():
        interrupt()


# --- from input.sample_loader: Map-style data sets, sample by sample in torch's DataLoader, with random numbers that no worker can change.

EpochSamples = Tuple[int, np.ndarray]  # of one call: the epoch, and int64 [combined_batch_size]
_GRACE_S_sample_loader = 1.0  # for a sample that a worker is making when the workers are to end


class SampleLoader:
    """torch's DataLoader over a data set of one's own, told the samples of each call; its workers live as long."""

    def __init__(self, data: Any, seed: int, num_workers: int) -> None:
        self._batches = _Batches()
        samples: Any = SeededSamples(data, seed)
        batches: Any = self._batches
        self._loader: Any = DataLoader(
            samples,
            batch_sampler=batches,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            generator=torch.Generator(),  # or every iteration would draw from the program's own
        )

    def load(self, calls: Iterable[EpochSamples]) -> Iterator[Any]:
        """Of every call, the indices of its samples (int64 tensor, as workers saw them) and the samples, collated."""
        self._batches.calls = ([(epoch, int(sample)) for sample in samples] for epoch, samples in calls)
        return iter(self._loader)

    def close(self) -> None:
        """End the worker processes, whatever they are doing, and whoever waits for them in another thread."""
        iterator = getattr(self._loader, "_iterator", None)  # persistent workers end with their iterator
        if iterator is None:
            return
        self._loader._iterator = None
        # torch by itself waits for 5 s for each of them, one after the other.
        end_blocked = threading.Timer(
            _GRACE_S_sample_loader, lambda: [worker.terminate() for worker in iterator._workers]
        )
        end_blocked.start()
        try:
            iterator._shutdown_workers()
        finally:
            end_blocked.cancel()
            end_blocked.join()
        iterator._worker_result_queue.close()  # else another thread would ask it for results for ever


class _Batches:
    """A batch sampler whose content is set before each iteration."""

    def __init__(self) -> None:
        self.calls: Iterable[List[Tuple[int, int]]] = ()

    def __iter__(self) -> Iterator[List[Tuple[int, int]]]:
        return iter(self.calls)


class SeededSamples:
    """Samples with their index; random numbers depend on (seed, epoch, sample), whichever process makes the sample."""

    def __init__(self, data: Any, seed: int) -> None:
        self._data, self._seed = data, seed

    def __getitem__(self, key: Tuple[int, int]) -> Any:
        epoch, sample = key
        with _seeded(sample_seed(self._seed, epoch, sample)):
            return sample, self._data[sample]


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch, numpy and random for one sample, and put their states back."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
