"""Windows of tokens of which some are masked, by random numbers of the sample."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import numpy as np
import torch

from raypod.datasets.arrays import fingerprint_of_values
from raypod.datasets.corpus import Tokenizer
from raypod.datasets.loading import NO_EPOCH
from raypod.datasets.order import augmentation_integers
from raypod.datasets.source import Batch
from raypod.datasets.text import TextSource, Windows

IGNORED = -100  # label of a token that is not predicted, as of transformers
_UNIT = 1 << 24
_MASKED, _RANDOM = 0.8, 0.1  # of the predicted tokens; the others stay (Devlin et al. 2019)


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
