"""The combined batches that one instance feeds to its calls.

`order` decides which samples a call gets; the shuffling and partitioning of `poptorch.DataLoader` are not used, so that
the order does not depend on the number of instances. Arrays are gathered a whole call at a time in a background thread;
other data sets are loaded sample by sample, in worker processes.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, ContextManager, Generator, Iterable, Iterator, Optional, Tuple

import numpy as np
import torch
from torch.utils.data import default_collate

from raypod.datasets.arrays import ArrayDataset, Splits
from raypod.datasets.loading import EpochSamples, SampleLoader, SeededSamples, map_ahead, prefetch, timed
from raypod.datasets.order import call_positions, epoch_order, samples_digest
from raypod.datasets.transforms import activation_dtype, gather, normalize, resize
from raypod.errors import ConfigError
from raypod.plan.config import VISION_TRANSFORMERS
from raypod.plan.placement import InstanceSpec
from raypod.plan.plan import Leg, Plan

Batch = Tuple[torch.Tensor, torch.Tensor]
Call = Tuple[np.ndarray, Batch]  # sample indices int64 [combined_batch_size], and their batch
_AHEAD, _ASYNC_AHEAD = 1, 3  # calls loaded in advance: arrays by default, and any data with --async-dataloader
_NO_EPOCH = 1 << 32  # the epoch of evaluation, so that it draws the same random numbers each time


class Feed:
    """Load the calls of one instance, for training and for evaluation."""

    def __init__(self, plan: Plan, spec: InstanceSpec, splits: Splits) -> None:
        self._plan, self._spec, self._splits = plan, spec, splits
        self._loader: Optional[SampleLoader] = None
        self._test_loader: Optional[SampleLoader] = None
        self._stream: Optional[Generator[Call, None, None]] = None
        self._samples = np.zeros(0, dtype=np.int64)  # indices of the call that `calls` yielded last
        self._next_update = 0  # the update whose batch the stream yields next
        self._host_size = _host_size(splits, plan.config.data.eight_bit_io, plan.config.data.image_size)
        if not isinstance(splits.train, ArrayDataset):
            data = plan.config.data
            # The samples may draw from the process's global generators, as the replicas do: a background thread must
            # therefore load them in another process.
            workers = max(data.num_workers, int(data.async_dataloader))
            self._loader = SampleLoader(splits.train, plan.config.training.seed, workers)
            self._test_loader = SampleLoader(splits.test, plan.config.training.seed, data.num_workers)

    def sample_shape(self) -> Tuple[int, int]:
        """Return (channels, height) of the network's input.

        Raises:
            ConfigError: a vision transformer's images are not square.
        """
        channels, height, width = self.sent_shape()
        config = self._plan.config
        if config.data.image_size is None and height != width and config.training.model in VISION_TRANSFORMERS:
            raise ConfigError(
                f"{config.training.model} needs square images, not {height}x{width}: add --resize {height}"
            )
        return channels, config.data.image_size or height

    def sent_shape(self) -> Tuple[int, int, int]:
        """Return (channels, height, width) of an image as the host sends it to the device."""
        train, seed = self._splits.train, self._plan.config.training.seed
        if isinstance(train, ArrayDataset):
            _, (images, _) = self._gather_call(train, (_NO_EPOCH, np.arange(1)))
        else:
            _, sample = SeededSamples(train, seed)[_NO_EPOCH, 0]
            self._check_sample(sample)
            images, _ = self._to_device_format(default_collate([sample]))
        return images.shape[1], images.shape[2], images.shape[3]

    def calls(self, leg: Leg) -> Iterator[Batch]:
        """Yield (images, labels) of each call of a leg; images [combined_batch_size, channels, height, width].

        Background loading continues beyond the end of the leg, so that the next leg starts without a wait.
        """
        iterations = self._plan.geometry.device_iterations
        for update in range(leg.first_update, leg.first_update + leg.num_updates, iterations):
            if self._stream is None or self._next_update != update:
                self._end_stream()
                self._stream = self._batches_from(update)
            try:
                self._samples, batch = next(self._stream)
            except BaseException:
                self._end_stream()
                raise
            self._next_update = update + iterations
            yield batch

    def timed_calls(
        self, leg: Leg, waiting: Callable[[], ContextManager[Any]]
    ) -> Generator[Tuple[Batch, float], None, None]:
        """Yield the batches of `calls`, each with the seconds spent waiting for it, within the context `waiting()`."""
        return timed(self.calls(leg), waiting)

    def samples_digest(self) -> str:
        """Return the digest of the sample indices of the call that `calls` yielded last, as loaded."""
        return samples_digest(self._samples)

    def evaluation_calls(self) -> Iterator[Tuple[torch.Tensor, torch.Tensor, int]]:
        """Yield (images, labels, valid) for this instance's share of the test split.

        All calls have the same shape; rows from `valid` on are padding that repeats other samples.
        """
        total = len(self._splits.test)
        calls = list(self._evaluation_samples(total))
        for samples, (images, labels) in zip(calls, self._evaluation_batches([call % total for call in calls])):
            yield images, labels, int((samples < total).sum())

    def close(self) -> None:
        """End background loading and the worker processes."""
        self._end_stream()
        for loader in (self._loader, self._test_loader):
            if loader is not None:
                loader.close()

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _batches_from(self, first_update: int) -> Generator[Call, None, None]:
        """Yield the calls from an update to the end of the run."""
        samples, data = self._samples_from(first_update), self._plan.config.data
        if self._loader is None:
            workers = max(1, data.num_workers)
            depth = max(workers, _ASYNC_AHEAD if data.async_dataloader else _AHEAD)
            yield from map_ahead(functools.partial(self._gather_call, self._splits.train), samples, workers, depth)
        elif data.async_dataloader:
            yield from prefetch(self._load_calls(self._loader, samples), _ASYNC_AHEAD, self._loader.close)
        else:
            yield from self._load_calls(self._loader, samples)

    def _samples_from(self, first_update: int) -> Iterator[EpochSamples]:
        plan, iterations = self._plan, self._plan.geometry.device_iterations
        epoch, order = -1, np.empty(0)
        for update in range(first_update, plan.total_updates, iterations):
            if update // plan.updates_per_epoch != epoch:
                epoch = update // plan.updates_per_epoch
                order = epoch_order(plan.config.training.seed, epoch, plan.dataset_size.train_samples)
            call = update % plan.updates_per_epoch // iterations
            yield epoch, order[call_positions(plan.geometry, self._spec.index, call)]

    def _evaluation_samples(self, total: int) -> Iterator[np.ndarray]:
        """Yield the test samples of each of this instance's calls; indices from `total` on are padding."""
        size, instances = self._plan.geometry.evaluation_batch_size, self._plan.geometry.num_instances
        for call in range(-(-total // (size * instances))):
            first = (call * instances + self._spec.index) * size
            yield np.arange(first, first + size)

    def _evaluation_batches(self, calls: Iterable[np.ndarray]) -> Iterator[Batch]:
        samples = ((_NO_EPOCH, call) for call in calls)
        if self._test_loader is None:
            make = functools.partial(self._gather_call, self._splits.test)
            yield from (batch for _, batch in map_ahead(make, samples, 1, _AHEAD))
            return
        try:
            yield from (batch for _, batch in self._load_calls(self._test_loader, samples))
        finally:
            self._test_loader.close()  # idle workers would occupy memory until the next evaluation

    def _load_calls(self, loader: SampleLoader, calls: Iterable[EpochSamples]) -> Iterator[Call]:
        return ((samples.numpy(), self._to_device_format(batch)) for samples, batch in loader.load(calls))

    def _gather_call(self, data: ArrayDataset, call: EpochSamples) -> Call:
        epoch, samples = call
        random = None if epoch == _NO_EPOCH else (self._plan.config.training.seed, epoch)
        images, labels = gather(data, samples, self._splits.augmentation, random, self._host_size)
        return samples, self._to_device_format((torch.from_numpy(images), torch.from_numpy(labels)))

    def _to_device_format(self, batch: Any) -> Batch:
        """Check the labels; resize, normalize and cast the images, except for what the device does with 8-bit IO."""
        images, labels = batch
        self._check_labels(labels)
        config = self._plan.config
        size = self._host_size
        if size is not None and images.shape[-2:] != (size, size):
            images = self._resized(images, size)
        if config.data.eight_bit_io:
            if images.dtype != torch.uint8:
                raise ConfigError(
                    f"--eight-bit-io needs uint8 images, but those of {config.data.dataset} are {images.dtype}"
                )
            return images, labels
        dtype = activation_dtype(config.training.precision)
        if images.dtype == torch.uint8:
            return normalize(images, self._splits.mean, self._splits.std, dtype), labels
        return images.to(dtype), labels

    def _check_sample(self, sample: Any) -> None:
        name = self._plan.config.data.dataset
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise ConfigError(
                f"{name}: a sample must be (image, label), but the first one is a {type(sample).__name__}"
            )
        if not isinstance(sample[0], (torch.Tensor, np.ndarray)):
            kind = type(sample[0]).__name__
            raise ConfigError(f"{name}: images must be torch tensors or NumPy arrays, but the first one is a {kind}")
        if sample[0].ndim != 3:
            raise ConfigError(f"{name}: images must be [channels, height, width], not {list(sample[0].shape)}")

    def _check_labels(self, labels: torch.Tensor) -> None:
        """Raise a ConfigError for invalid labels, which would fail as an IndexError in each replica."""
        name, classes = self._plan.config.data.dataset, self._splits.classes
        if labels.dim() != 1 or labels.is_floating_point():
            raise ConfigError(f"{name}: labels must be integers, one per image")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise ConfigError(
                f"{name}: found label {low if low < 0 else high}, but labels of {classes} classes are 0 to "
                f"{classes - 1}; your own data set returns (train, test, number of classes)"
            )

    def _resized(self, images: torch.Tensor, size: int) -> torch.Tensor:
        if images.dtype != torch.uint8:
            name = self._plan.config.data.dataset
            raise ConfigError(f"--image-size {size} needs uint8 images, but those of {name} are {images.dtype}")
        return torch.from_numpy(resize(images.numpy(), (size, size)))


def _host_size(splits: Splits, eight_bit_io: bool, size: Optional[int]) -> Optional[int]:
    """Return the size to resize to on the host; None if the host does not resize.

    With 8-bit IO arrays are enlarged on the device instead.
    """
    is_enlarged = (
        size is not None and isinstance(splits.train, ArrayDataset) and size >= max(splits.train.images.shape[2:])
    )
    return None if eight_bit_io and is_enlarged else size
