"""Loaders of given calls in worker processes: sample by sample, or whole calls of arrays."""

from __future__ import annotations

import functools
import threading
from typing import Any, Callable, Iterable, Iterator, List, Optional, Tuple, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader

from raypod.errors import ConfigError, summarize_exception
from raypod.training.data.loading import JOIN_TIMEOUT_S, SeededSamples, collated, way_out_of
from raypod.training.data.order import EpochSamples

Item = TypeVar("Item")


class CallLoader:
    """A torch DataLoader that loads given calls.

    Args:
        data: the map-style data set of torch's DataLoader.
        num_workers: worker processes, kept alive between iterations; 0 loads in the calling thread.
        batching: further arguments of the DataLoader. The sampler that it names gets the calls.
    """

    def __init__(self, data: Any, num_workers: int, sampler: str, **batching: Any) -> None:
        self._calls = _Calls()
        self._loader: Any = DataLoader(
            data,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            generator=torch.Generator(),  # without it every iteration draws from torch's global generator
            **{sampler: self._calls},  # type: ignore[arg-type]
            **batching,
        )

    def load(self, calls: Iterable[EpochSamples]) -> Iterator[Any]:
        """Yield (indices, batch) of each call: an int64 tensor as the workers received it, and the batch."""
        self._calls.keys = calls
        return _with_short_errors(iter(self._loader))

    def interrupt(self) -> None:
        """End a wait of another thread for a call by an exception there."""
        self.close()

    def close(self) -> None:
        """End the worker processes, and any wait of another thread for their results."""
        iterator = getattr(self._loader, "_iterator", None)  # owns the persistent workers
        if iterator is None:
            return
        self._loader._iterator = None
        # torch waits up to 5 s for each worker, one after the other.
        terminate = threading.Timer(JOIN_TIMEOUT_S, lambda: [worker.terminate() for worker in iterator._workers])
        terminate.start()
        try:
            iterator._shutdown_workers()
        finally:
            terminate.cancel()
            terminate.join()
        iterator._worker_result_queue.close()  # otherwise a thread in `next(iterator)` waits forever


class SampleLoader(CallLoader):
    """Loads calls sample by sample from a map-style data set.

    Args:
        data: the map-style data set.
        seed: of the random numbers that the data set draws (see `SeededSamples`).
        num_workers: as in `CallLoader`.
        finish: makes the batch from collated samples.
        check: called with each sample and its index; it raises ConfigError for one that cannot be used.
        split: "training" or "test", for messages.
    """

    def __init__(
        self,
        data: Any,
        seed: int,
        num_workers: int,
        finish: Callable[[Any], Any],
        check: Optional[Callable[[Any, int], object]] = None,
        split: str = "training",
    ) -> None:
        self._samples = SeededSamples(data, seed, check)
        collate = functools.partial(_collate, finish=finish, name=f"{split} samples", way_out=way_out_of(data))
        super().__init__(self._samples, num_workers, "batch_sampler", collate_fn=collate)

    def load(self, calls: Iterable[EpochSamples]) -> Iterator[Any]:
        """As `CallLoader.load`."""
        keys: Any = ([(epoch, int(sample)) for sample in samples] for epoch, samples in calls)
        return super().load(keys)

    def interrupt(self) -> None:
        """End a wait of another thread for samples by an exception there, at the latest when its sample is loaded."""
        self._samples.is_interrupted = True
        super().interrupt()


class GatherLoader(CallLoader):
    """Gathers whole calls in worker processes.

    They work while the SDK holds the interpreter lock, for which a thread waits. A batch comes in shared memory.
    """

    def __init__(self, gather: Callable[[EpochSamples], Any], num_workers: int) -> None:
        """`gather` returns the samples of a call, int64 [combined_batch_size], and their batch."""
        super().__init__(_Gathered(gather), num_workers, "sampler", batch_size=None)


class _Gathered:
    """Maps each call to its batch."""

    def __init__(self, gather: Callable[[EpochSamples], Any]) -> None:
        self._gather = gather

    def __getitem__(self, call: EpochSamples) -> Any:
        return self._gather(call)


class _Calls:
    """A sampler whose keys are assigned before each iteration."""

    def __init__(self) -> None:
        self.keys: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys)


def _collate(samples: List[Tuple[int, Any]], finish: Callable[[Any], Any], name: str, way_out: str) -> Any:
    indices = [index for index, _ in samples]
    batch = collated([sample for _, sample in samples], indices, name, way_out)
    return torch.from_numpy(np.array(indices)), finish(batch)


def _with_short_errors(batches: Iterator[Item]) -> Iterator[Item]:
    """Yield the same batches. The message of a worker's ConfigError has the whole traceback: raise its last line."""
    try:
        yield from batches
    except ConfigError as error:
        raise ConfigError(summarize_exception(error).partition("ConfigError: ")[2]) from None
