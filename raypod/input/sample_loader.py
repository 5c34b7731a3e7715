"""Map-style data sets, sample by sample in torch's DataLoader, with random numbers that no worker can change."""

from __future__ import annotations

import contextlib
import random
import threading
from typing import Any, Iterable, Iterator, List, Tuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from raypod.sampling import sample_seed

EpochSamples = Tuple[int, np.ndarray]  # of one call: the epoch, and int64 [combined_batch_size]
_GRACE_S = 1.0  # for a sample that a worker is making when the workers are to end


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
        end_blocked = threading.Timer(_GRACE_S, lambda: [worker.terminate() for worker in iterator._workers])
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
