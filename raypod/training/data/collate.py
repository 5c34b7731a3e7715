"""`Task.collate` and `pad_collate`: samples of different lengths become samples of one shape.

A device needs the same shape in every call, and a batch must not depend on the placement. So the function is called
with one sample at a time, and torch's `default_collate` combines the results.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Sequence, Tuple, Union

import torch

from raypod.errors import ConfigError
from raypod.training.data.loading import NO_EPOCH, SeededSamples

Collate = Callable[[Sequence[Any]], Any]


class Collated:
    """A map-style data set whose samples have passed a collate function.

    Attributes:
        uncollated: the data set before.
        way_out: what to do about samples that differ nevertheless, for messages.
    """

    def __init__(self, data: Any, collate: Collate) -> None:
        self.uncollated, self._collate = data, collate
        self.fingerprint = getattr(data, "fingerprint", "")
        self.files = getattr(data, "files", None)  # those of shards are downloaded
        pads = isinstance(collate, PadCollate)  # another function may draw from any generator
        self.way_out = "the task's `collate` must return the same shapes and types for all samples"
        self.way_out += ": its pad_collate pads the first dimension of the entries in `fields`" if pads else ""
        self.draws_from_torch_only = pads and getattr(data, "draws_from_torch_only", False)

    def __len__(self) -> int:
        return len(self.uncollated)

    def __getitem__(self, index: int) -> Any:
        """Return the only sample of the batch that the function makes of sample `index`."""
        batch = self._collate([self.uncollated[index]])
        if isinstance(batch, Mapping):
            return {name: values[0] for name, values in batch.items()}
        return tuple(values[0] for values in batch) if isinstance(batch, (tuple, list)) else batch[0]


class PadCollate:
    """Pads the first dimension of tensors at its end. See `pad_collate`."""

    def __init__(
        self,
        lengths: Tuple[int, ...],
        fields: Optional[Tuple[Any, ...]],
        value: Union[float, Mapping[Any, float]],
        mask: Optional[str],
    ) -> None:
        self._lengths, self._fields, self._value, self._mask = lengths, fields, value, mask

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch of padded samples. ConfigError for one that is longer than the longest length."""
        return torch.utils.data.default_collate([self._padded(sample) for sample in samples])

    def for_splits(self, splits: Mapping[str, Any], seed: int) -> PadCollate:
        """Return the function with one length: the smallest one that holds every sample of the splits.

        With several lengths all samples are loaded once, unless a split has an attribute `lengths`. ConfigError if a
        sample is longer than all of them.
        """
        longest = 0
        for name, split in splits.items() if len(self._lengths) > 1 else ():
            for index, length in self._lengths_in(split, seed):
                if length > self._lengths[-1]:
                    raise ConfigError(f"{name} sample {index}: {self._too_long(length)}")
                longest = max(longest, length)
        chosen = next(length for length in self._lengths if length >= longest)
        return PadCollate((chosen,), self._fields, self._value, self._mask)

    def _lengths_in(self, split: Any, seed: int) -> Iterator[Tuple[int, int]]:
        """Yield (index, length) of each sample that can be loaded: others may be left out."""
        known = getattr(split, "lengths", None)
        if known is not None:
            yield from ((index, int(length)) for index, length in enumerate(known))
            return
        samples = SeededSamples(split, seed)
        for index in range(len(split)):
            with contextlib.suppress(Exception):
                yield index, self._length(samples[NO_EPOCH, index][1])

    def _length(self, sample: Any) -> int:
        """Return the length of the longest entry that is padded."""
        return max((len(tensor) for key, tensor in _entries(sample).items() if self._is_padded(key, tensor)), default=0)

    def _is_padded(self, key: Any, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 0 and (self._fields is None or key in self._fields)

    def _padded(self, sample: Any) -> Any:
        entries = _entries(sample)
        values = self._value if isinstance(self._value, Mapping) else ()
        unknown = [key for key in (*(self._fields or ()), *values) if key not in entries]
        if unknown:
            known = ", ".join(map(repr, entries))
            raise ConfigError(f"pad_collate: a sample has no entry {unknown[0]!r}; its entries are {known}")
        length, target = self._length(sample), self._lengths[-1]
        if length > target:
            raise ConfigError(f"a sample cannot be padded: {self._too_long(length)}")
        found: Dict[Any, torch.Tensor] = {}
        for key, tensor in entries.items():
            found[key] = self._pad(key, tensor, target) if self._is_padded(key, tensor) else tensor
        if self._mask is not None:
            found[self._mask] = torch.zeros(target)
            found[self._mask][:length] = 1
        if isinstance(sample, Mapping):
            return found
        return tuple(found.values()) if isinstance(sample, (tuple, list)) or self._mask is not None else found[0]

    def _pad(self, key: Any, tensor: torch.Tensor, length: int) -> torch.Tensor:
        value = self._value.get(key, 0) if isinstance(self._value, Mapping) else self._value
        padded = tensor.new_full((length, *tensor.shape[1:]), value)
        padded[: len(tensor)] = tensor
        return padded

    def _too_long(self, length: int) -> str:
        return (
            f"its length is {length}, and the longest length of pad_collate is {self._lengths[-1]}: truncate the "
            f"sample, or use pad_collate(..., {length})"
        )


def pad_collate(
    *lengths: int,
    fields: Optional[Sequence[Any]] = None,
    value: Union[float, Mapping[Any, float]] = 0,
    mask: Optional[str] = None,
) -> PadCollate:
    """Return a collate function that pads the first dimension of samples to one length, the same in all calls.

    Args:
        lengths: the allowed lengths. A run uses the smallest one that holds every sample of both splits: data sets with
            a similar longest sample then share a compiled program.
        fields: names of a dict, or numbers of a tuple, that are padded; default: all tensors with a dimension.
        value: what is appended; a dict has the values by field, as in `{"label": -100}`.
        mask: name of a further entry of the samples, the last one of tuples: float32 [length], 1 where nothing is
            padded.

    Raises:
        ConfigError: no length is given, or one is not a positive integer.
    """
    if not lengths or any(not isinstance(length, int) or length < 1 for length in lengths):
        raise ConfigError(f"pad_collate needs lengths, positive integers as in pad_collate(64, 128), not {lengths}")
    return PadCollate(tuple(sorted(lengths)), None if fields is None else tuple(fields), value, mask)


def _entries(sample: Any) -> Dict[Any, torch.Tensor]:
    """Return the tensors of a sample by name or number."""
    if not isinstance(sample, Mapping):
        sample = dict(enumerate(sample if isinstance(sample, (tuple, list)) else [sample]))
    return {key: torch.as_tensor(value) for key, value in sample.items()}
