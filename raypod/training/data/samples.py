"""The data of a user's task: arrays or map-style data sets of tensors, tuples or dicts, and their `collate`.

A device needs the same shape in every call, and a batch must not depend on the placement. So the function is called
with one sample at a time, and torch's `default_collate` combines the results.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import torch

from raypod.errors import ConfigError
from raypod.training.data.arrays import fingerprint_of_bytes, fingerprint_of_values
from raypod.training.data.loading import NO_EPOCH, SeededSamples, collated, way_out_of
from raypod.training.data.source import FIRST, Batch, Source
from raypod.training.data.user_dataset import way_to_use

_CHECKED_SAMPLES = 16  # of each split, evenly spaced
_SEARCH_S = 1.0  # for other samples of each split
_SEARCHED_SAMPLES = 1_000_000
_HASHED_ROWS = 1024  # of each array, evenly spaced


class Arrays:
    """A data set in memory: named arrays with one row per sample.

    Args:
        fields: NumPy arrays or torch tensors [samples, ...] of one length. float64 becomes float32.

    Raises:
        ConfigError: the lengths differ, or a dtype has no counterpart in torch.
    """

    def __init__(self, **fields: Any) -> None:
        self.fields: Dict[str, np.ndarray] = {name: _array(name, values) for name, values in fields.items()}
        lengths = {name: len(values) for name, values in self.fields.items()}
        if len(set(lengths.values())) != 1:
            shown = ", ".join(f"{name} {length}" for name, length in lengths.items()) or "no array"
            raise ConfigError(f"Arrays: all arrays must have the same length, but there is {shown}")

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def __getitem__(self, index: int) -> Dict[str, np.ndarray]:
        """Return the row `index` of each array by name."""
        return {name: values[index] for name, values in self.fields.items()}


class NamedBatch(Tuple[torch.Tensor, ...]):
    """The tensors of a batch, by number, or by name if samples are dicts."""

    names: Tuple[str, ...] = ()

    @classmethod
    def of(cls, batch: Batch, names: Optional[Tuple[str, ...]]) -> NamedBatch:
        """Return a batch with the names of its tensors; None if they have none."""
        found = cls(batch)
        found.names = names or ()
        return found

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.names:
            known = f"they are {', '.join(self.names)}" if self.names else "use numbers, as samples are tuples"
            raise KeyError(f"the batch has no tensor {key!r}: {known}")
        return super().__getitem__(self.names.index(key))


class SampleSource(Source):
    """The splits of a user's task.

    Args:
        task: the task's name, for messages.
        splits: the training split, and the test split or None.
        seed: of the random numbers that samples draw.
        first: see `Source`.
        collate: `Task.collate`, or None.

    Raises:
        ConfigError: the splits cannot be used.
    """

    def __init__(self, task: str, splits: Any, seed: int, first: int = 0, collate: Optional[Collate] = None) -> None:
        self._task, self.first = task, first
        self.train, self.test = _checked_splits(task, splits)
        if collate is not None:
            self.train, self.test = _collated_splits(task, self.train, self.test, collate, seed)
        self.is_in_memory = isinstance(self.train, Arrays)
        if isinstance(self.train, Arrays):
            self.names = tuple(self.train.fields)
        elif len(self.train):
            sample = self.first_sample(seed)
            self.names = tuple(sample) if isinstance(sample, dict) else None
        self.fingerprint = _fingerprint(task, self.train, self.test)

    def gather(self, split: Any, samples: np.ndarray, seed_and_epoch: Optional[Tuple[int, int]]) -> Batch:
        return tuple(torch.from_numpy(values[samples]) for values in split.fields.values())

    def first_batch(self, seed: int) -> NamedBatch:
        return NamedBatch.of(super().first_batch(seed), self.names)

    def check_batches(self, seed: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Combine a few samples of each split to a batch, as is done later. ConfigError if they cannot be combined.

        Then compare others with the first one, in a random order, for a second: a rare sample of another size would
        end the run after hours. Samples that cannot be loaded are skipped: they may be left out.
        """
        for name, split in (("training", self.train), ("test", self.test)) if not self.is_in_memory else ():
            loaded: Dict[int, Any] = {}
            samples = SeededSamples(split, seed)
            spread = range(0, len(split), max(1, len(split) // _CHECKED_SAMPLES))
            for index in sorted({1, *spread, len(split) - 1} & set(range(len(split)))):
                with contextlib.suppress(Exception):
                    loaded[index] = samples[NO_EPOCH, index][1]
            for index, sample in loaded.items():
                self.check_sample(sample, f"{name} sample {index}")
            if loaded:
                collated(list(loaded.values()), list(loaded), f"{name} samples", way_out_of(split))
                until_s = clock() + _SEARCH_S
                for index in _random_order(len(split)):
                    if clock() >= until_s:
                        break
                    pair = dict([next(iter(loaded.items()))])
                    with contextlib.suppress(Exception):
                        pair[index] = samples[NO_EPOCH, index][1]
                    collated(list(pair.values()), list(pair), f"{name} samples", way_out_of(split))

    def check_sample(self, sample: Any, name: str = FIRST) -> None:
        values = sample.items() if isinstance(sample, dict) else enumerate(_listed(sample))
        shown = "the first sample" if name == FIRST else name
        for entry, value in values:
            is_array = isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc"
            if not is_array and not isinstance(value, (torch.Tensor, int, float)):
                raise ConfigError(
                    f"task {self._task}: samples must be tensors, or tuples or dicts of tensors, but the entry "
                    f"{entry!r} of {shown} is a {type(value).__name__}: make a tensor of it in `collate`"
                )

    def to_device_format(self, batch: Any) -> Batch:
        """See `Source.to_device_format`: float64 becomes float32."""
        values = [batch[name] for name in self.names] if self.names is not None else _listed(batch)
        return tuple(each.float() if each.dtype == torch.float64 else each for each in values)


def _random_order(number: int) -> List[int]:
    """Return numbers below `number`: all, in a fixed random order, or as many random ones as can be searched."""
    generator = np.random.default_rng(0)
    is_small = number <= _SEARCHED_SAMPLES
    order = generator.permutation(number) if is_small else generator.integers(0, number, _SEARCHED_SAMPLES)
    return [int(each) for each in order]


def _listed(sample: Any) -> List[Any]:
    return list(sample) if isinstance(sample, (tuple, list)) else [sample]


def _array(name: str, values: Any) -> np.ndarray:
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    try:
        torch.from_numpy(array[:0].copy())
    except (TypeError, IndexError) as error:
        raise ConfigError(f"Arrays: {name} cannot be used: {error}") from None
    return array


def _checked_splits(task: str, splits: Any) -> Tuple[Any, Any]:
    if not isinstance(splits, (tuple, list)) or len(splits) != 2:
        hint = ', as in data["train"], data["test"]' if isinstance(splits, dict) else ""
        raise ConfigError(
            f"task {task}: datasets() must return (train, test){hint}, and returned {type(splits).__name__}"
        )
    train, test = splits
    for name, split in (("train", train), ("test", test)):
        other_kind = None if split is None else way_to_use(split)
        if other_kind is not None:
            raise ConfigError(f"task {task}: the {name} split is {other_kind}")
    if train is None:
        raise ConfigError(f"task {task}: datasets() returned no training split")
    if test is None:
        return train, []
    if isinstance(train, Arrays) != isinstance(test, Arrays):
        raise ConfigError(f"task {task}: either both splits are Arrays, or none")
    if isinstance(train, Arrays) and list(train.fields) != list(test.fields):
        raise ConfigError(
            f"task {task}: the splits have different arrays: {', '.join(train.fields)} and {', '.join(test.fields)}"
        )
    return train, test


def _collated_splits(task: str, train: Any, test: Any, collate: Collate, seed: int) -> Tuple[Any, Any]:
    """Return the splits with samples that have passed `Task.collate`. ConfigError if one cannot be padded."""
    if isinstance(train, Arrays):
        raise ConfigError(f"task {task}: collate has no effect on Arrays, whose rows have one shape; omit it")
    try:
        inspect.signature(collate).bind([])
    except ValueError:  # a function in C may have no signature
        pass
    except TypeError:
        raise ConfigError(
            f"task {task}: collate must take one argument, the samples: write a method collate(self, samples), or "
            "collate = staticmethod(FUNCTION)"
        ) from None
    if isinstance(collate, PadCollate):
        try:
            collate = collate.for_splits({"training": train, "test": test}, seed)
        except ConfigError as error:
            raise ConfigError(f"task {task}: {error}") from None
    return Collated(train, collate), Collated(test, collate)


def _fingerprint(task: str, train: Any, test: Any) -> str:
    """Return the hash of the sizes, and of rows of arrays or of the attribute `fingerprint` of the training split."""
    content = getattr(train, "fingerprint", "")
    arrays = [array for split in (train, test) if isinstance(split, Arrays) for array in split.fields.values()]
    if arrays:
        rows = [array[:: max(1, len(array) // _HASHED_ROWS)] for array in arrays]
        content = fingerprint_of_bytes(*[np.ascontiguousarray(row) for row in rows])
    return fingerprint_of_values(task, len(train), len(test), content)


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
