"""Text as packed windows of tokens, in the format of the device."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import numpy as np
import torch

from raypod.datasets.arrays import fingerprint_of_bytes, fingerprint_of_values
from raypod.datasets.corpus import Text, num_windows
from raypod.datasets.source import Batch, Source
from raypod.errors import ConfigError


class Windows:
    """Consecutive windows of a text: window i holds the tokens from i * length to (i + 1) * length, inclusive.

    Args:
        text: the tokens; those after the last whole window are not used.
        length: tokens that a window predicts; it holds one more.
    """

    def __init__(self, text: Text, length: int) -> None:
        self.text, self.length = text, length

    def __len__(self) -> int:
        return num_windows(len(self.text.tokens), self.length)

    def num_bytes(self, windows: np.ndarray) -> np.ndarray:
        """Return the bytes of the predicted tokens of each window: int32 [windows]."""
        if self.text.ends is None:
            return np.full(len(windows), self.length, dtype=np.int32)
        ends = self.text.ends[np.stack([windows, windows + 1]) * self.length]
        sizes: np.ndarray = (ends[1] - ends[0]).astype(np.int32)
        return sizes


class TextSource(Source):
    """The windows of the training and the held-out text.

    A batch is (tokens int32 [n, length + 1], bytes of the predicted tokens int32 [n]).
    """

    is_in_memory = True

    def __init__(self, train: Windows, test: Windows) -> None:
        self.train, self.test = train, test
        arrays = [array for each in (train, test) for array in (each.text.tokens, each.text.ends) if array is not None]
        self.fingerprint = fingerprint_of_values(train.length, fingerprint_of_bytes(*arrays))

    def gather(self, split: Any, samples: np.ndarray, seed_and_epoch: Optional[Tuple[int, int]]) -> Batch:
        """See `Source.gather`.

        Raises:
            ConfigError: the text of this host is shorter than that of the plan.
        """
        if len(samples) and samples.max() >= len(split):
            raise ConfigError(
                f"the text on this host has {len(split)} windows, and the plan counts more: copy one text to all hosts"
            )
        positions = samples[:, None] * split.length + np.arange(split.length + 1)
        return self.to_device_format((split.text.tokens[positions], split.num_bytes(samples)))

    def to_device_format(self, batch: Any) -> Batch:
        """See `Source.to_device_format`."""
        tokens, num_bytes = batch
        return torch.from_numpy(tokens.astype(np.int32)), torch.from_numpy(num_bytes)
