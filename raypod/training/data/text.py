"""Text as packed windows of tokens in the format of the device, and the masking of tokens for BERT."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import numpy as np
import torch

from raypod.errors import ConfigError
from raypod.training.data.arrays import fingerprint_of_bytes, fingerprint_of_values
from raypod.training.data.corpus import Text, Tokenizer, num_windows
from raypod.training.data.loading import NO_EPOCH
from raypod.training.data.order import augmentation_integers
from raypod.training.data.source import Batch, Source

IGNORED = -100  # label of a token that is not predicted, as of transformers
_UNIT = 1 << 24
_MASKED, _RANDOM = 0.8, 0.1  # of the predicted tokens; the others stay (Devlin et al. 2019)


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


class MaskedSource(TextSource):
    """The windows of a text, of which some tokens are to be predicted.

    A batch is (tokens int32 [n, length], labels int32 [n, length], -100 where nothing is predicted). The choice is a
    function of (seed, epoch, window); in an evaluation of (seed, window).

    Args:
        train, test: the windows.
        seed: of the random numbers.
        share: of the tokens that are predicted; at least one of a window, and no token that ends a file.
        tokenizer: of the text.
        mask: the token in place of most of them.
    """

    def __init__(self, train: Windows, test: Windows, seed: int, share: float, tokenizer: Tokenizer, mask: int) -> None:
        super().__init__(train, test)
        self._seed, self._share, self._tokenizer, self._mask = seed, share, tokenizer, mask
        self.fingerprint = fingerprint_of_values(self.fingerprint, share, mask)

    def gather(self, split: Any, samples: np.ndarray, seed_and_epoch: Optional[Tuple[int, int]]) -> Batch:
        """See `Source.gather`."""
        windows, _ = super().gather(split, samples, seed_and_epoch)
        tokens = windows.numpy()[:, :-1].copy()
        seed, epoch = (self._seed, NO_EPOCH) if seed_and_epoch is None else seed_and_epoch
        length = tokens.shape[1]
        drawn = augmentation_integers(seed, epoch, samples, _UNIT, 3 * length)
        chance, kind, other = drawn[:, :length], drawn[:, length : 2 * length], drawn[:, 2 * length :]
        chance = np.where(tokens == self._tokenizer.end, _UNIT + chance, chance)
        chosen = (chance < self._share * _UNIT) | (chance == chance.min(axis=1, keepdims=True))
        labels = np.where(chosen, tokens, IGNORED).astype(np.int32)
        replaced = np.where(kind < _MASKED * _UNIT, self._mask, other % self._tokenizer.vocabulary)
        changed = np.where(chosen & (kind < (_MASKED + _RANDOM) * _UNIT), replaced, tokens).astype(np.int32)
        return torch.from_numpy(changed), torch.from_numpy(labels)
