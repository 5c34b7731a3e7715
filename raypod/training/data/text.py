"""Text as packed windows of tokens in the format of the device, and the masking of tokens for BERT."""

from __future__ import annotations

import hashlib
from typing import Any, Optional, Tuple

import numpy as np
import torch

from raypod.errors import ConfigError
from raypod.training.data.arrays import fingerprint_of_bytes, fingerprint_of_values
from raypod.training.data.corpus import Text, Tokenizer, num_windows, pack_sequences
from raypod.training.data.loading import NO_EPOCH
from raypod.training.data.order import augmentation_integers
from raypod.training.data.source import Batch, Source

IGNORED = -100  # label of a token that is not predicted, as of transformers
_UNIT = 1 << 24
_HASHED = 1 << 22  # tokens at a time
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
        if self.text.sizes is None:
            return np.full(len(windows), self.length, dtype=np.int32)
        predicted = windows[:, None] * self.length + np.arange(1, self.length + 1)
        sizes: np.ndarray = self.text.sizes[predicted].sum(axis=1).astype(np.int32)
        return sizes


class TextSource(Source):
    """The windows of the training and the held-out text.

    A batch is (tokens int32 [n, length + 1], bytes of the predicted tokens int32 [n]).

    Args:
        train, test: the windows.
        content: `hash_of` both texts, if it is known.
    """

    is_in_memory = True

    def __init__(self, train: Windows, test: Windows, content: Optional[str] = None) -> None:
        self.train, self.test = train, test
        self.fingerprint = fingerprint_of_values(train.length, content or hash_of(train.text, test.text))

    def gather(self, split: Any, samples: np.ndarray, seed_and_epoch: Optional[Tuple[int, int]]) -> Batch:
        """See `Source.gather`. ConfigError if the text of this host is shorter than that of the plan."""
        self._check(split, samples)
        positions = samples[:, None] * split.length + np.arange(split.length + 1)
        return self.to_device_format((split.text.tokens[positions], split.num_bytes(samples)))

    def to_device_format(self, batch: Any) -> Batch:
        return tuple(torch.from_numpy(each.astype(np.int32)) for each in batch)

    def _check(self, split: Any, samples: np.ndarray) -> None:
        if len(samples) and samples.max() >= len(split):
            raise ConfigError(
                f"the text on this host has {len(split)} windows, and the plan counts more: copy one text to all hosts"
            )


def hash_of(*texts: Text) -> str:
    """Return the SHA-256 of texts. It does not depend on the types of the integers, except for texts of bytes."""
    digest = hashlib.sha256()
    for text in texts:
        kind = text.tokens.dtype if text.tokens.dtype == np.uint8 else np.dtype(np.int32)
        digest.update(f"{text.tokens.shape} {kind}\n".encode())
        for first in range(0, len(text.tokens), _HASHED):
            digest.update(text.tokens[first : first + _HASHED].astype(kind).tobytes())
        if text.sizes is not None:
            digest.update(f"{text.sizes.shape} int64\n".encode())
            end = 0
            for first in range(0, len(text.sizes), _HASHED):
                ends = end + np.cumsum(text.sizes[first : first + _HASHED], dtype=np.int64)
                digest.update(ends.tobytes())
                end = ends[-1]
    return digest.hexdigest()


class PackedWindows(Windows):
    """Windows of several sequences (see `corpus.pack_sequences`)."""

    def __init__(self, text: Text, length: int) -> None:
        super().__init__(text, length)
        found = pack_sequences(np.diff(np.append(text.starts, len(text.tokens))).tolist(), length)
        order = np.argsort(found.windows, kind="stable")
        self._first, self._sizes, self._count = found.first[order], found.sizes[order], found.num_windows
        self._begins = np.searchsorted(found.windows[order], np.arange(self._count + 1))

    def __len__(self) -> int:
        return self._count

    def fill(
        self, window: int, inputs: np.ndarray, labels: np.ndarray, segments: np.ndarray, places: np.ndarray
    ) -> int:
        """Write a window into zeros [length], and labels that are `IGNORED`; return the bytes of the predicted tokens.

        The sequences have the segments 1, 2, ...; padding is segment 0. Places count from 0 in each sequence.
        """
        at, num_bytes = 0, 0
        for segment, each in enumerate(range(self._begins[window], self._begins[window + 1]), start=1):
            first, size = self._first[each], self._sizes[each]
            end = at + size
            inputs[at:end] = self.text.tokens[first : first + size]
            labels[at:end] = self.text.tokens[first + 1 : first + size + 1]
            segments[at:end], places[at:end] = segment, np.arange(size)
            num_bytes += size if self.text.sizes is None else int(self.text.sizes[first + 1 : first + size + 1].sum())
            at = end
        return int(num_bytes)


class SequenceSource(TextSource):
    """Windows of several sequences each.

    A batch is (tokens, labels, segments and places: int32 [n, length], bytes of the predicted tokens: int32 [n]).
    """

    def __init__(self, train: PackedWindows, test: PackedWindows, content: Optional[str] = None) -> None:
        super().__init__(train, test, content)
        starts = fingerprint_of_bytes(train.text.starts, test.text.starts)
        self.fingerprint = fingerprint_of_values(self.fingerprint, starts)

    def gather(self, split: Any, samples: np.ndarray, seed_and_epoch: Optional[Tuple[int, int]]) -> Batch:
        """See `Source.gather`. ConfigError as in `TextSource`."""
        self._check(split, samples)
        columns = [np.full((len(samples), split.length), value, np.int32) for value in (0, IGNORED, 0, 0)]
        num_bytes = [split.fill(window, *rows) for window, *rows in zip(samples.tolist(), *columns)]
        return self.to_device_format((*columns, np.array(num_bytes)))


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
        content: as of `TextSource`.
    """

    def __init__(
        self,
        train: Windows,
        test: Windows,
        seed: int,
        share: float,
        tokenizer: Tokenizer,
        mask: int,
        content: Optional[str] = None,
    ) -> None:
        super().__init__(train, test, content)
        self._seed, self._share, self._tokenizer, self._mask = seed, share, tokenizer, mask
        self.fingerprint = fingerprint_of_values(self.fingerprint, share, mask)

    def gather(self, split: Any, samples: np.ndarray, seed_and_epoch: Optional[Tuple[int, int]]) -> Batch:
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
