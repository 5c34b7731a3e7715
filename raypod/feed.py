"""From data set to combined batch: what one instance feeds in each of its calls.

The feed of the run's one idea: which samples a call takes is `sampling.py`'s arithmetic, so the loader's own shuffling
and partition are not used (a loader of one's own is legal: poptorch contract section 13, trap 54). Data sets held in
memory are gathered a whole call at a time; others are loaded sample by sample in worker processes.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
from typing import Any, Iterable, Iterator, List, Optional, Tuple

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from raypod.datasets.arrays import ArrayDataset, Splits
from raypod.errors import ConfigError
from raypod.placement import InstanceSpec
from raypod.plan import Leg, Plan
from raypod.sampling import call_positions, epoch_order, sample_seed
from raypod.transforms import gather, normalise

Batch = Tuple[torch.Tensor, torch.Tensor]
_AHEAD = 3  # calls prepared in the background
_NO_EPOCH = 1 << 32  # of the training: evaluation draws its own random numbers, the same ones every time


class Feed:
    """The calls of one instance, in order."""

    def __init__(self, plan: Plan, spec: InstanceSpec, splits: Splits) -> None:
        self._plan, self._spec, self._splits = plan, spec, splits
        self._loader: Optional[_SampleLoader] = None
        self._test_loader: Optional[_SampleLoader] = None
        if not isinstance(splits.train, ArrayDataset):
            data = plan.config.data
            # Samples of one's own draw from the process's generators: beside the replicas only in another process.
            workers = max(data.num_workers, int(data.async_dataloader))
            self._loader = _SampleLoader(splits.train, plan.config.training.seed, workers)
            self._test_loader = _SampleLoader(splits.test, plan.config.training.seed, data.num_workers)

    def sample_shape(self) -> Tuple[int, int]:
        """(channels, height) of an image."""
        train, seed = self._splits.train, self._plan.config.training.seed
        if isinstance(train, ArrayDataset):
            images, _ = next(self._gathered(train, [np.arange(1)], None))
        else:
            images, _ = self._typed(default_collate([_SeededSamples(train, seed)[_NO_EPOCH, 0]]))
        if images.dim() != 4:
            raise ConfigError(f"images must be [channels, height, width], not {list(images.shape[1:])}")
        return images.shape[1], images.shape[2]

    def calls(self, leg: Leg) -> Iterator[Batch]:
        """(images, labels) of every call of a leg; images [combined_batch_size, channels, height, width]."""
        batches = self._calls(leg)
        if self._plan.config.data.async_dataloader:
            return _ahead(batches)
        return batches

    def evaluation_calls(self) -> Iterator[Tuple[torch.Tensor, torch.Tensor, int]]:
        """(images, labels, valid): this instance's share of the test split.

        Every call has the same shape; rows from `valid` on repeat earlier samples and do not count.
        """
        total = len(self._splits.test)
        calls = list(self._evaluation_samples(total))
        for samples, (images, labels) in zip(calls, self._evaluation_batches([call % total for call in calls])):
            yield images, labels, int((samples < total).sum())

    def close(self) -> None:
        """End the worker processes."""
        for loader in (self._loader, self._test_loader):
            if loader is not None:
                loader.close()

    def _calls(self, leg: Leg) -> Iterator[Batch]:
        plan = self._plan
        order = epoch_order(plan.config.training.seed, leg.epoch, plan.size.train_samples)
        in_epoch = leg.first_update - leg.epoch * plan.updates_per_epoch
        first = in_epoch // plan.geometry.device_iterations
        number = leg.num_updates // plan.geometry.device_iterations
        positions = (call_positions(plan.geometry, self._spec.index, call) for call in range(first, first + number))
        calls = (order[part] for part in positions)
        if self._loader is None:
            return self._gathered(self._splits.train, calls, (plan.config.training.seed, leg.epoch))
        return map(self._typed, self._loader.load(calls, leg.epoch))

    def _evaluation_samples(self, total: int) -> Iterator[np.ndarray]:
        """The test samples of this instance's calls, counted on beyond `total` in the last one."""
        size, instances = self._plan.geometry.evaluation_batch_size, self._plan.geometry.num_instances
        for call in range(-(-total // (size * instances))):
            first = (call * instances + self._spec.index) * size
            yield np.arange(first, first + size)

    def _evaluation_batches(self, calls: Iterable[np.ndarray]) -> Iterator[Batch]:
        if self._test_loader is None:
            yield from self._gathered(self._splits.test, calls, None)
            return
        try:
            yield from map(self._typed, self._test_loader.load(calls, _NO_EPOCH))
        finally:
            self._test_loader.close()  # between two evaluations its workers would only hold memory

    def _gathered(
        self, data: ArrayDataset, calls: Iterable[np.ndarray], augmentation: Optional[Tuple[int, int]]
    ) -> Iterator[Batch]:
        for samples in calls:
            images, labels = gather(data, samples, self._splits.augmentation, augmentation)
            yield self._typed((torch.from_numpy(images), torch.from_numpy(labels)))

    def _typed(self, batch: Any) -> Batch:
        """Normalise on the host unless the device does (8-bit IO), and cast to the precision of the activations."""
        images, labels = batch
        config = self._plan.config
        if config.data.eight_bit_io:
            if images.dtype != torch.uint8:
                raise ConfigError(f"--eight-bit-io needs uint8 images, and {config.data.dataset} gives {images.dtype}")
            return images, labels
        if images.dtype == torch.uint8:
            images = normalise(images, self._splits.mean, self._splits.std)
        half = config.training.precision.startswith("16")
        return images.to(torch.float16 if half else torch.float32), labels


class _SampleLoader:
    """torch's DataLoader over a data set of one's own, told the samples of each call; its workers live as long."""

    def __init__(self, data: Any, seed: int, num_workers: int) -> None:
        self._batches = _Batches()
        samples: Any = _SeededSamples(data, seed)
        batches: Any = self._batches
        self._loader: Any = DataLoader(
            samples,
            batch_sampler=batches,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            generator=torch.Generator(),  # or every iteration would draw from the program's own
        )

    def load(self, calls: Iterable[np.ndarray], epoch: int) -> Iterator[Any]:
        """The collated samples of every call."""
        self._batches.calls = ([(epoch, int(sample)) for sample in call] for call in calls)
        return iter(self._loader)

    def close(self) -> None:
        """End the worker processes."""
        iterator = getattr(self._loader, "_iterator", None)  # persistent workers end with their iterator
        if iterator is not None:
            iterator._shutdown_workers()
            self._loader._iterator = None


class _Batches:
    """A batch sampler whose content is set before each iteration."""

    def __init__(self) -> None:
        self.calls: Iterable[List[Tuple[int, int]]] = ()

    def __iter__(self) -> Iterator[List[Tuple[int, int]]]:
        return iter(self.calls)


class _SeededSamples:
    """A data set whose random numbers depend on (seed, epoch, sample), whichever process makes the sample."""

    def __init__(self, data: Any, seed: int) -> None:
        self._data, self._seed = data, seed

    def __getitem__(self, key: Tuple[int, int]) -> Any:
        epoch, sample = key
        with _seeded(sample_seed(self._seed, epoch, sample)):
            return self._data[sample]


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


def _ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches, the next `_AHEAD` of them prepared in a thread; an error there surfaces here, in its place."""
    slots: queue.Queue[Any] = queue.Queue(maxsize=_AHEAD)
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
        thread.join()
