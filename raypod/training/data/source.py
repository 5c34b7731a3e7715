"""The interface between `Feed` and the data of a task: its splits, and batches in the format of the device."""

from __future__ import annotations

import abc
from typing import Any, Iterator, Optional, Tuple

import numpy as np
import torch

from raypod.training.data.loading import NO_EPOCH, SeededSamples, collated
from raypod.training.data.order import EpochSamples
from raypod.training.data.shard_stream import StreamedFiles

Batch = Tuple[torch.Tensor, ...]
FIRST = "the first one"  # name of a sample


class Source(abc.ABC):
    """The loaded splits of a task.

    `gather` and `to_device_format` also run in threads, while a model compiles. PopTorch then replaces torch's factory
    functions in the whole process (`torch.empty`, `torch.tensor` and others): they make tensors by `torch.from_numpy`
    or by the methods of a tensor.

    Attributes:
        train, test: map-style data sets; if `is_in_memory`, only their lengths are used, and `gather`.
        fingerprint: hash that identifies the data, the same on every host.
        names: of the tensors of a batch; None if they have none.
        first: the training sample from which the shapes of a batch are known.
        is_in_memory: whether `gather` makes batches, in a background thread; otherwise worker processes load samples.
    """

    train: Any
    test: Any
    fingerprint: str
    names: Optional[Tuple[str, ...]] = None
    first: int = 0
    is_in_memory: bool = False

    def gather(self, split: Any, samples: np.ndarray, seed_and_epoch: Optional[Tuple[int, int]]) -> Batch:
        """Return the batch of samples of a split in memory, in the format of the device.

        Args:
            split: `train` or `test`.
            samples: indices, int64 [n].
            seed_and_epoch: of the random numbers of training samples; None in an evaluation.
        """
        raise NotImplementedError

    def begin(self) -> None:
        """Start what `prepared` needs for the training samples, so that it is ready when the model is."""
        files = _streamed(self.train)
        if files is not None:
            files.begin()

    def prepared(self, split: Any, calls: Iterator[EpochSamples], behind: int) -> Iterator[EpochSamples]:
        """Yield the same calls, each when its samples can be read: shards of a URL are downloaded.

        ReadFailed as for samples.

        Args:
            split: `train` or `test`.
            calls: their samples.
            behind: calls whose samples may not be read yet when a later one is yielded.
        """
        files = _streamed(split)
        return calls if files is None else files.prepared(calls, behind)

    def interrupt(self) -> None:
        """End the waits of `prepared` for training samples, from another thread. An evaluation may follow."""
        files = _streamed(self.train)
        if files is not None:
            files.interrupt()

    def close(self) -> None:
        """End what `begin` and `prepared` have started."""
        for files in filter(None, map(_streamed, (self.train, self.test))):
            files.close()

    def with_pairs(self, batch: Batch, samples: np.ndarray, micro_batch: int, seed_and_epoch: Tuple[int, int]) -> Batch:
        """Return a training batch with what the device needs to mix the samples of a micro-batch.

        Args:
            samples: indices in the order of the batch, int64 [n].
            micro_batch: samples of a micro-batch; the batch consists of them.
            seed_and_epoch: of the random numbers.
        """
        del samples, micro_batch, seed_and_epoch  # nothing is mixed
        return batch

    def first_sample(self, seed: int) -> Any:
        """Load the training sample `first` as an evaluation would. ConfigError if it cannot be used."""
        _, sample = SeededSamples(self.train, seed)[NO_EPOCH, self.first]
        self.check_sample(sample)
        return sample

    def first_batch(self, seed: int) -> Batch:
        """Return the batch of the training sample `first`, without augmentation, as the host sends it to the device."""
        if self.is_in_memory:
            return self.gather(self.train, np.array([self.first]), None)
        return self.to_device_format(collated([self.first_sample(seed)], [self.first]))

    def check_sample(self, sample: Any, name: str = FIRST) -> None:
        """Check a sample that was loaded on its own. ConfigError if it cannot be used; `name` is that of the sample."""
        del sample  # every sample can be used

    @abc.abstractmethod
    def to_device_format(self, batch: Any) -> Batch:
        """Return a collated batch of samples that were loaded one by one, in the format of the device.

        Raises:
            ConfigError: it cannot be used.
        """


def _streamed(split: Any) -> Optional[StreamedFiles]:
    """Return the files of a split whose shards are at a URL; None for another one."""
    files = getattr(split, "files", None)
    return files if isinstance(files, StreamedFiles) else None
