"""From data set to combined batch: what one instance feeds in each of its calls.

The feed of the run's one idea: which samples a call takes is `sampling.py`'s arithmetic, so the loader's own shuffling
and partition are not used (a loader of one's own is legal: poptorch contract section 13, trap 54). Arrays are gathered
a whole call at a time, in a thread beside the call before; other data sets sample by sample, in worker processes.
"""

from __future__ import annotations

import functools
from typing import Any, Generator, Iterable, Iterator, Optional, Tuple

import numpy as np
import torch
from torch.utils.data import default_collate

from raypod.datasets.arrays import ArrayDataset, Splits
from raypod.datasets.loading import EpochSamples, SampleLoader, SeededSamples, ahead, prepared
from raypod.datasets.order import call_positions, epoch_order
from raypod.datasets.transforms import gather, normalise, resize
from raypod.errors import ConfigError
from raypod.plan.config import VISION_TRANSFORMERS
from raypod.plan.placement import InstanceSpec
from raypod.plan.plan import Leg, Plan

Batch = Tuple[torch.Tensor, torch.Tensor]
Gathered = Tuple[np.ndarray, Batch]  # with the indices of its samples, int64 [combined_batch_size]
_AHEAD, _ASYNC_AHEAD = 1, 3  # calls prepared in the background: for arrays always, with --async-dataloader for all
_NO_EPOCH = 1 << 32  # of the training: evaluation draws its own random numbers, the same ones every time


class Feed:
    """The calls of one instance, in order."""

    def __init__(self, plan: Plan, spec: InstanceSpec, splits: Splits) -> None:
        self._plan, self._spec, self._splits = plan, spec, splits
        self._loader: Optional[SampleLoader] = None
        self._test_loader: Optional[SampleLoader] = None
        self._stream: Optional[Generator[Gathered, None, None]] = None
        self.samples = np.zeros(0, dtype=np.int64)  # of the call that was handed out last, as they were gathered
        self._next_update = 0  # what comes next out of the stream
        self._host_size = _host_size(splits, plan.config.data.eight_bit_io, plan.config.data.image_size)
        if not isinstance(splits.train, ArrayDataset):
            data = plan.config.data
            # Samples of one's own draw from the process's generators: beside the replicas only in another process.
            workers = max(data.num_workers, int(data.async_dataloader))
            self._loader = SampleLoader(splits.train, plan.config.training.seed, workers)
            self._test_loader = SampleLoader(splits.test, plan.config.training.seed, data.num_workers)

    def sample_shape(self) -> Tuple[int, int]:
        """(channels, height) of an image as the network sees it."""
        channels, height, width = self.sent_shape()
        config = self._plan.config
        if config.data.image_size is None and height != width and config.training.model in VISION_TRANSFORMERS:
            raise ConfigError(
                f"{config.training.model} needs square images, not {height}x{width}: add --resize {height}"
            )
        return channels, config.data.image_size or height

    def sent_shape(self) -> Tuple[int, int, int]:
        """(channels, height, width) of an image as it goes to the device."""
        train, seed = self._splits.train, self._plan.config.training.seed
        if isinstance(train, ArrayDataset):
            _, (images, _) = self._gathered(train, (_NO_EPOCH, np.arange(1)))
        else:
            _, sample = SeededSamples(train, seed)[_NO_EPOCH, 0]
            self._check_sample(sample)
            images, _ = self._typed(default_collate([sample]))
        return images.shape[1], images.shape[2], images.shape[3]

    def calls(self, leg: Leg) -> Iterator[Batch]:
        """(images, labels) of every call of a leg; images [combined_batch_size, channels, height, width].

        Loading goes on beyond the leg: the first call of the next one is ready when it begins.
        """
        iterations = self._plan.geometry.device_iterations
        for update in range(leg.first_update, leg.first_update + leg.num_updates, iterations):
            if self._stream is None or self._next_update != update:
                self._end_stream()
                self._stream = self._batches_from(update)
            try:
                self.samples, batch = next(self._stream)
            except BaseException:
                self._end_stream()
                raise
            self._next_update = update + iterations
            yield batch

    def evaluation_calls(self) -> Iterator[Tuple[torch.Tensor, torch.Tensor, int]]:
        """(images, labels, valid): this instance's share of the test split.

        Every call has the same shape; rows from `valid` on repeat earlier samples and do not count.
        """
        total = len(self._splits.test)
        calls = list(self._evaluation_samples(total))
        for samples, (images, labels) in zip(calls, self._evaluation_batches([call % total for call in calls])):
            yield images, labels, int((samples < total).sum())

    def close(self) -> None:
        """End the loading in the background, and the worker processes."""
        self._end_stream()
        for loader in (self._loader, self._test_loader):
            if loader is not None:
                loader.close()

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _batches_from(self, first_update: int) -> Generator[Gathered, None, None]:
        """The calls from an update on, to the end of the run."""
        samples, data = self._samples_from(first_update), self._plan.config.data
        if self._loader is None:
            workers = max(1, data.num_workers)
            depth = max(workers, _ASYNC_AHEAD if data.async_dataloader else _AHEAD)
            yield from prepared(functools.partial(self._gathered, self._splits.train), samples, workers, depth)
        elif data.async_dataloader:
            yield from ahead(self._loaded(self._loader, samples), _ASYNC_AHEAD, self._loader.close)
        else:
            yield from self._loaded(self._loader, samples)

    def _samples_from(self, first_update: int) -> Iterator[EpochSamples]:
        plan, iterations = self._plan, self._plan.geometry.device_iterations
        epoch, order = -1, np.empty(0)
        for update in range(first_update, plan.total_updates, iterations):
            if update // plan.updates_per_epoch != epoch:
                epoch = update // plan.updates_per_epoch
                order = epoch_order(plan.config.training.seed, epoch, plan.size.train_samples)
            call = update % plan.updates_per_epoch // iterations
            yield epoch, order[call_positions(plan.geometry, self._spec.index, call)]

    def _evaluation_samples(self, total: int) -> Iterator[np.ndarray]:
        """The test samples of this instance's calls, counted on beyond `total` in the last one."""
        size, instances = self._plan.geometry.evaluation_batch_size, self._plan.geometry.num_instances
        for call in range(-(-total // (size * instances))):
            first = (call * instances + self._spec.index) * size
            yield np.arange(first, first + size)

    def _evaluation_batches(self, calls: Iterable[np.ndarray]) -> Iterator[Batch]:
        samples = ((_NO_EPOCH, call) for call in calls)
        if self._test_loader is None:
            make = functools.partial(self._gathered, self._splits.test)
            yield from (batch for _, batch in prepared(make, samples, 1, _AHEAD))
            return
        try:
            yield from (batch for _, batch in self._loaded(self._test_loader, samples))
        finally:
            self._test_loader.close()  # between two evaluations its workers would only hold memory

    def _loaded(self, loader: SampleLoader, calls: Iterable[EpochSamples]) -> Iterator[Gathered]:
        return ((samples.numpy(), self._typed(batch)) for samples, batch in loader.load(calls))

    def _gathered(self, data: ArrayDataset, call: EpochSamples) -> Gathered:
        epoch, samples = call
        random = None if epoch == _NO_EPOCH else (self._plan.config.training.seed, epoch)
        images, labels = gather(data, samples, self._splits.augmentation, random, self._host_size)
        return samples, self._typed((torch.from_numpy(images), torch.from_numpy(labels)))

    def _typed(self, batch: Any) -> Batch:
        """Resize and normalise on the host unless the device does (8-bit IO); cast to the precision of activations."""
        images, labels = batch
        self._check_labels(labels)
        config = self._plan.config
        size = self._host_size
        if size is not None and images.shape[-2:] != (size, size):
            images = self._resized(images, size)
        if config.data.eight_bit_io:
            if images.dtype != torch.uint8:
                raise ConfigError(f"--eight-bit-io needs uint8 images, and {config.data.dataset} gives {images.dtype}")
            return images, labels
        dtype = torch.float16 if config.training.precision.startswith("16") else torch.float32
        if images.dtype == torch.uint8:
            return normalise(images, self._splits.mean, self._splits.std, dtype), labels
        return images.to(dtype), labels

    def _check_sample(self, sample: Any) -> None:
        name = self._plan.config.data.dataset
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise ConfigError(
                f"{name}: a sample must be (image, label), and its first one is a {type(sample).__name__}"
            )
        if not isinstance(sample[0], (torch.Tensor, np.ndarray)):
            kind = type(sample[0]).__name__
            raise ConfigError(f"{name}: images must be torch tensors or NumPy arrays, and its first one is a {kind}")
        if sample[0].ndim != 3:
            raise ConfigError(f"{name}: images must be [channels, height, width], not {list(sample[0].shape)}")

    def _check_labels(self, labels: torch.Tensor) -> None:
        """Here, or each replica would end with an IndexError of its own."""
        name, classes = self._plan.config.data.dataset, self._splits.classes
        if labels.dim() != 1 or labels.is_floating_point():
            raise ConfigError(f"{name}: labels must be whole numbers, one per image")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise ConfigError(
                f"{name}: a label is {low if low < 0 else high}, and those of {classes} classes are 0 to "
                f"{classes - 1}; a data set of your own returns (train, test, number of classes)"
            )

    def _resized(self, images: torch.Tensor, size: int) -> torch.Tensor:
        if images.dtype != torch.uint8:
            raise ConfigError(
                f"--image-size {size} needs uint8 images, and {self._plan.config.data.dataset} gives others"
            )
        return torch.from_numpy(resize(images.numpy(), (size, size)))


def _host_size(splits: Splits, eight_bit_io: bool, size: Optional[int]) -> Optional[int]:
    """The size that images get on the host, if any: with 8-bit IO arrays are enlarged on the device instead."""
    is_enlarged = (
        size is not None and isinstance(splits.train, ArrayDataset) and size >= max(splits.train.images.shape[2:])
    )
    return None if eight_bit_io and is_enlarged else size
