"""Data sets of the data loading tests, in a module that other processes can import."""

from __future__ import annotations

import collections
import os
import time
from typing import Any, Iterator

import poptorch
import torch
from torch.utils.data import IterableDataset

FORK = {"sharing_strategy": poptorch.SharingStrategy.Fork}
Pair = collections.namedtuple("Pair", ["first", "second"])


class Numbers(torch.utils.data.Dataset):
    """Samples 0, 1, 2, ... as float32 [2]."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), float(index))


class Broken(Numbers):
    """Numbers of which one raises an error."""

    def __init__(self, length: int, broken: int) -> None:
        super().__init__(length)
        self.broken = broken

    def __getitem__(self, index: int) -> Any:
        if index == self.broken:
            raise RuntimeError(f"sample {index} cannot be read")
        return super().__getitem__(index)


class Hung(Numbers):
    """Numbers of which sample 2 never returns."""

    def __getitem__(self, index: int) -> Any:
        while index == 2:
            time.sleep(0.05)
        return super().__getitem__(index)


class Where(Numbers):
    """Samples are the id of the process that loads them."""

    def __getitem__(self, index: int) -> Any:
        return os.getpid()


class RandomNumbers(Numbers):
    """Samples are random."""

    def __getitem__(self, index: int) -> Any:
        return torch.rand(1)


class Stream(IterableDataset):
    """A stream of numbers, sharded over workers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.length, step))


class Boxed:
    """A type that needs a registered parser."""

    def __init__(self, inside: torch.Tensor) -> None:
        self.inside = inside


class BoxParser(poptorch.ICustomArgParser):
    """The parser of `Boxed`."""

    def yieldTensors(self, struct: Boxed) -> Iterator[torch.Tensor]:
        yield struct.inside

    def reconstruct(self, original_structure: Boxed, tensor_iterator: Iterator[torch.Tensor]) -> Boxed:
        return Boxed(next(tensor_iterator))


def numbers(element: Any) -> list[int]:
    """Return the samples in a batch of `Numbers` or of integers."""
    return [int(number) for number in (element[:, 0] if element.dim() > 1 else element)]


def epoch(data: Any) -> list[int]:
    """Return the samples of an epoch, in order."""
    return [number for element in data for number in numbers(element)]


# The batches of a batch sampler, and what `collate_padded` makes of them with two batches per call.
SAMPLER = [[0, 1, 2], [3, 4], [5, 6, 7], [8], [9]]
PADDED = [
    [[0, 3], [1, 3], [2, 3], [-1, 3], [3, 2], [4, 2], [-1, 2], [-1, 2]],
    [[5, 3], [6, 3], [7, 3], [-1, 3], [8, 1], [-1, 1], [-1, 1], [-1, 1]],
]


def collate_padded(samples: Any) -> torch.Tensor:
    """Return 4 rows: the number of the sample, or -1 for padding, and the size of the batch."""
    numbers = [int(torch.as_tensor(sample).flatten()[0]) for sample in samples]
    return torch.tensor([[number, len(numbers)] for number in [*numbers, *[-1] * (4 - len(numbers))]])
