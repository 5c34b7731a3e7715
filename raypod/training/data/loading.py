"""Loading batches in the background, and samples with their own random numbers."""

from __future__ import annotations

import collections
import contextlib
import queue
import random
import threading
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, Callable, ContextManager, Deque, Generator, Iterator, List, Optional, Sequence, Tuple, TypeVar

import numpy as np
import torch
from torch.utils.data import default_collate

from raypod.errors import ConfigError, DataUnreadable, summarize_exception
from raypod.plan.placement import InstanceSpec
from raypod.system.retries import is_passing
from raypod.training.data.arrays import check_mapped
from raypod.training.data.order import sample_seeds
from raypod.training.data.read_failures import ReadFailed, StillLoading

Item = TypeVar("Item")
Request = TypeVar("Request")
NO_EPOCH = 1 << 32  # the epoch of evaluation, so that it draws the same random numbers each time
JOIN_TIMEOUT_S = 1.0  # on close, before a blocked thread or worker process is interrupted
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # before samples are read again
# Of samples that differ.
_WAY_OUT = "resize or pad them in the data set, or by a line of the task, `collate = raypod.pad_collate(64, 128)`"


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Raise an error of the disk or the network, also if it is the cause of another one, as ReadFailed."""
    try:
        check_mapped()
        yield
    except Exception as error:
        cause: Optional[BaseException] = error
        while cause is not None:
            if is_passing(cause):
                raise ReadFailed(summarize_exception(error)) from error
            cause = cause.__cause__ or cause.__context__
        raise


class Retry:
    """The attempts to read the samples of one call again.

    Args:
        spec: the instance, for messages.
        limit_s: from the first failure on.
        pause: waits some seconds; what it raises ends the attempts.
    """

    def __init__(self, spec: InstanceSpec, limit_s: float, pause: Callable[[float], object]) -> None:
        self._spec, self._limit_s, self._pause = spec, limit_s, pause
        self._first_s: Optional[float] = None
        self._pause_s = _FIRST_PAUSE_S

    def wait(self, error: ReadFailed) -> None:
        """Wait before the next attempt, each time longer. DataUnreadable if the time is over."""
        if isinstance(error, StillLoading):
            self._first_s, self._pause_s = None, _FIRST_PAUSE_S
            warnings.warn(f"the training waits for {error}", RuntimeWarning, 2)
            self._pause(0.0)
            return
        now_s, cause = time.monotonic(), summarize_exception(error).partition(f"{ReadFailed.__name__}: ")[2]
        if self._first_s is None:
            self._first_s = now_s
            if self._limit_s:
                limit = f"run.read_retry_s = {self._limit_s:g}"
                warnings.warn(f"samples cannot be read and are read again ({limit}): {cause}", RuntimeWarning, 2)
        left_s = self._first_s + self._limit_s - now_s
        if left_s <= 0:
            raise DataUnreadable(self._spec.index, self._spec.host, self._limit_s, cause) from error
        self._pause(min(self._pause_s, left_s))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


def timed(
    batches: Iterator[Item], waiting: Callable[[], ContextManager[Any]] = contextlib.nullcontext
) -> Generator[Tuple[Item, float], None, None]:
    """Yield each batch and the seconds spent waiting for it.

    Args:
        batches: closed together with this generator, if it has `close()`.
        waiting: makes a context manager that is entered during each wait.
    """
    with contextlib.ExitStack() as stack:
        close = getattr(batches, "close", None)
        if close is not None:
            stack.callback(close)
        while True:
            began = time.monotonic()
            with waiting():
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch, time.monotonic() - began


def map_ahead(
    make: Callable[[Request], Item], requests: Iterator[Request], workers: int, depth: int
) -> Generator[Item, None, None]:
    """Yield `make(request)` for each request, in order, with up to `depth` results computed in advance.

    `make` runs in `workers` threads and should release the GIL for most of its time. Its exceptions are raised at the
    position of the request.
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


def prefetch(batches: Iterator[Item], depth: int, interrupt: Callable[[], None]) -> Generator[Item, None, None]:
    """Yield the same batches, with up to `depth` of them prefetched by a background thread.

    An exception of `batches` is raised at its position. If the thread is still inside `next(batches)` a second after
    this generator is closed, `interrupt()` is called to unblock it.
    """
    slots: queue.Queue[Any] = queue.Queue(maxsize=depth)
    closed = threading.Event()

    def put(item: Any) -> bool:
        while not closed.is_set():
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
        except BaseException as error:  # noqa: BLE001 - raised again in the consumer's thread
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
        closed.set()
        _join(thread, interrupt)


def _join(thread: threading.Thread, interrupt: Callable[[], None]) -> None:
    thread.join(JOIN_TIMEOUT_S)
    if thread.is_alive():
        interrupt()


class SeededSamples:
    """Map (epoch, sample) to (sample, data[sample]), with random numbers seeded by (seed, epoch, sample).

    A sample is therefore the same in whichever process it is loaded. Data sets with a true attribute
    `draws_from_torch_only` draw from torch's global generator only; seeding the others takes 0.1 ms per sample.
    """

    def __init__(self, data: Any, seed: int, check: Optional[Callable[[Any, int], object]] = None) -> None:
        """`check` is that of `SampleLoader`."""
        self._data, self._seed, self._check = data, seed, check
        self._is_torch_only = getattr(data, "draws_from_torch_only", False)
        self.is_interrupted = False  # the next sample raises InterruptedError

    def __getitem__(self, key: Tuple[int, int]) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Tuple[int, int]]) -> List[Any]:
        """Return the values of several keys, as torch's DataLoader loads a batch.

        Raises:
            InterruptedError: `is_interrupted` was set.
            ReadFailed: the disk or the network failed; other errors are those of the data set.
        """
        loaded = []
        with _restored(self._is_torch_only):
            for (_, sample), seed in zip(keys, sample_seeds(self._seed, keys)):
                if self.is_interrupted:
                    raise InterruptedError
                with reading():
                    _seed(seed, self._is_torch_only)
                    loaded.append((sample, self._data[sample]))
                if self._check is not None:
                    self._check(loaded[-1][1], sample)
        return loaded


def way_out_of(data: Any) -> str:
    """Return what to do about samples of a split that differ."""
    return str(getattr(data, "way_out", _WAY_OUT))


def collated(samples: List[Any], indices: Sequence[int], name: str = "samples", way_out: str = _WAY_OUT) -> Any:
    """Return the batch of samples, as torch's `default_collate`. ConfigError with their indices if they differ."""
    try:
        return default_collate(samples)
    except Exception as error:
        for index, sample in zip(indices, samples):
            difference = _difference(samples[0], sample)
            if difference:
                what = f"{name} {indices[0]} and {index} cannot be combined to a batch"
                raise ConfigError(f"{what}: {difference}; {way_out}") from error
        raise


class FixedShapes:
    """The shapes and types of the batches of a split: those of the first one, for which its program is compiled."""

    def __init__(self, split: str, names: Optional[Sequence[str]], data: Any = None) -> None:
        """`names`: of the tensors of a batch; None if they have none. `data`: the split."""
        self._split, self._names, self._way_out = split, names, way_out_of(data)
        self._first: Optional[Tuple[int, List[Any]]] = None  # its first sample, and its shapes and types

    def check(self, samples: np.ndarray, batch: Sequence[torch.Tensor]) -> None:
        """Check a batch of these samples. ConfigError, with a sample of each, if it differs from the first batch."""
        found = [(each.shape[1:], each.dtype) for each in batch]
        if self._first is None:
            self._first = int(samples[0]), found
        if found != self._first[1]:
            what = f"{self._split} samples {self._first[0]} and {samples[0]} have different shapes or types"
            difference = _difference(self._named(self._first[1]), self._named(found))
            raise ConfigError(f"{what}: {difference}; {self._way_out}")

    def _named(self, batch: List[Any]) -> Any:
        entries = [SimpleNamespace(shape=shape, dtype=dtype) for shape, dtype in batch]
        return tuple(entries) if self._names is None else dict(zip(self._names, entries))


def _difference(one: Any, other: Any) -> str:
    """Return how two samples differ that cannot be combined; "" if nothing is found."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"their keys are {', '.join(map(str, one))} and {', '.join(map(str, other))}"
        pairs = [(f"{name!r}: ", one[name], other[name]) for name in one]
    elif isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        if len(one) != len(other):
            return f"they have {len(one)} and {len(other)} entries"
        pairs = [(f"entry {number}: ", *both) for number, both in enumerate(zip(one, other))]
    else:
        shapes = [list(each.shape) if hasattr(each, "shape") else type(each).__name__ for each in (one, other)]
        if shapes[0] == shapes[1]:  # torch combines tensors of two types, and a program has one
            shapes = [str(getattr(each, "dtype", "")) for each in (one, other)]
        return "" if shapes[0] == shapes[1] else f"{shapes[0]} and {shapes[1]}"
    return next((f"{name}{found}" for name, *both in pairs for found in [_difference(*both)] if found), "")


def _seed(seed: int, is_torch_only: bool) -> None:
    torch.default_generator.manual_seed(seed)
    if not is_torch_only:
        np.random.seed(seed)
        random.seed(seed)


@contextlib.contextmanager
def _restored(is_torch_only: bool) -> Iterator[None]:
    """Restore the states of the random numbers of torch, and of numpy and random, after the block."""
    state = torch.get_rng_state()
    others = None if is_torch_only else (np.random.get_state(), random.getstate())
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if others is not None:
            np.random.set_state(others[0])
            random.setstate(others[1])
