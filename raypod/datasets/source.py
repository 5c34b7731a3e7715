"""The interface between `Feed` and the data of a task: its splits, and batches in the format of the device."""

from __future__ import annotations

import abc
from typing import Any, Optional, Tuple

import numpy as np
import torch
from torch.utils.data import default_collate

from raypod.datasets.loading import NO_EPOCH, SeededSamples

Batch = Tuple[torch.Tensor, ...]


class Source(abc.ABC):
    """The loaded splits of a task.

    Attributes:
        train, test: map-style data sets; if `is_in_memory`, only their lengths are used, and `gather`.
        fingerprint: hash that identifies the data, the same on every host.
        is_in_memory: whether `gather` makes batches, in a background thread; otherwise worker processes load samples.
    """

    train: Any
    test: Any
    fingerprint: str
    is_in_memory: bool = False

    def gather(self, split: Any, samples: np.ndarray, seed_and_epoch: Optional[Tuple[int, int]]) -> Batch:
        """Return the batch of samples of a split in memory, in the format of the device.

        Args:
            split: `train` or `test`.
            samples: indices, int64 [n].
            seed_and_epoch: of the random numbers of training samples; None in an evaluation.
        """
        raise NotImplementedError

    def first_sample(self, seed: int) -> Any:
        """Load the first training sample as an evaluation would. ConfigError if it cannot be used."""
        _, sample = SeededSamples(self.train, seed)[NO_EPOCH, 0]
        self.check_sample(sample)
        return sample

    def first_batch(self, seed: int) -> Batch:
        """Return the batch of the first training sample, without augmentation, as the host sends it to the device."""
        if self.is_in_memory:
            return self.gather(self.train, np.arange(1), None)
        return self.to_device_format(default_collate([self.first_sample(seed)]))

    def check_sample(self, sample: Any) -> None:
        """Check the first sample that worker processes would load. ConfigError if it cannot be used."""
        del sample  # every sample can be used

    @abc.abstractmethod
    def to_device_format(self, batch: Any) -> Batch:
        """Return a collated batch of samples that were loaded one by one, in the format of the device.

        Raises:
            ConfigError: it cannot be used.
        """
