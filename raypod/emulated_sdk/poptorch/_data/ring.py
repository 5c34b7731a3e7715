"""The ring buffer between the process that loads and the one that trains (contract 1.9, AsynchronousDataAccessor).

The memory begins with counters and a queue of entries, written by one process and read by the other; behind them lie
the slots, each as large as one element. An entry says which slot holds an element of which epoch, or that an epoch
ended. Whatever either process is interrupted in, the counters tell where to go on.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import List, NamedTuple, Sequence, Tuple

import torch

from poptorch._data.descriptors import SharedMemory

_ALIGNMENT = 64  # of tensors, in bytes: a cache line
_NUMBERS_PER_ENTRY = 3

END = -1  # `rows` of the entry that ends an epoch
WHOLE = -2  # `rows` of an element that fills its slot


class Entry(NamedTuple):
    """A filled slot, or the end of an epoch.

    rows: how much of dimension 0 every tensor has; WHOLE; or END.
    """

    epoch: int
    rows: int
    slot: int


class Board:
    """Counters and entries, in the first bytes of the memory: 64-bit numbers, each written by one process only."""

    # written by the loading process
    _PUBLISHED = 0
    # written by the reading process
    _TAKEN, _WANTED_EPOCH, _STOP = 1, 2, 3
    _NUMBERS = 4

    def __init__(self, memory: SharedMemory, slots: int) -> None:
        # Every slot may hold the only element of an epoch.
        self._capacity = 2 * slots + 1
        self._numbers = memoryview(memory.map()).cast("q")

    @staticmethod
    def size(slots: int) -> int:
        """Bytes, in whole pages."""
        numbers = Board._NUMBERS + _NUMBERS_PER_ENTRY * (2 * slots + 1)
        return _rounded_up(8 * numbers, mmap.PAGESIZE)

    @property
    def published(self) -> int:
        """Entries written so far."""
        return self._numbers[self._PUBLISHED]

    @property
    def taken(self) -> int:
        """Entries that the reader is done with, and whose slots are free."""
        return self._numbers[self._TAKEN]

    @taken.setter
    def taken(self, count: int) -> None:
        self._numbers[self._TAKEN] = count

    @property
    def wanted_epoch(self) -> int:
        """The epoch that is being read, from 1; 0 before the first."""
        return self._numbers[self._WANTED_EPOCH]

    @wanted_epoch.setter
    def wanted_epoch(self, epoch: int) -> None:
        self._numbers[self._WANTED_EPOCH] = epoch

    @property
    def must_stop(self) -> bool:
        """Whether the reader asked the loading process to end."""
        return bool(self._numbers[self._STOP])

    def stop(self) -> None:
        """Ask the loading process to end."""
        self._numbers[self._STOP] = 1

    def has_room(self) -> bool:
        """Whether one more entry can be published."""
        return self.published - self.taken < self._capacity

    def publish(self, entry: Entry) -> None:
        """Write the next entry; what it stands for must be complete."""
        published = self.published
        start = self._start(published)
        self._numbers[start], self._numbers[start + 1], self._numbers[start + 2] = entry
        self._numbers[self._PUBLISHED] = published + 1

    def entry(self, index: int) -> Entry:
        """An entry that was published and not yet taken."""
        start = self._start(index)
        return Entry(*self._numbers[start : start + _NUMBERS_PER_ENTRY])

    def _start(self, index: int) -> int:
        return self._NUMBERS + _NUMBERS_PER_ENTRY * (index % self._capacity)


@dataclass(frozen=True)
class SlotLayout:
    """Dtype and shape of every tensor of an element, one after the other in a slot."""

    tensors: Tuple[Tuple[torch.dtype, torch.Size], ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> SlotLayout:
        """The layout of elements like this one."""
        return cls(tuple((tensor.dtype, tensor.shape) for tensor in tensors))

    def size(self) -> int:
        """Bytes of a slot."""
        return sum(_bytes(dtype, shape) for dtype, shape in self.tensors)

    def views(self, memory: torch.Tensor) -> List[torch.Tensor]:
        """The tensors of the slot that these bytes are."""
        views, start = [], 0
        for dtype, shape in self.tensors:
            length = shape.numel() * _item_size(dtype)
            views.append(memory[start : start + length].view(dtype).view(shape))
            start += _bytes(dtype, shape)
        return views


def map_slots(memory: SharedMemory, layout: SlotLayout, slots: int) -> List[List[torch.Tensor]]:
    """The tensors of every slot, on the memory behind the board; the memory must be large enough."""
    size, start = layout.size(), Board.size(slots)
    everything = torch.frombuffer(memory.map(), dtype=torch.uint8)  # type: ignore[no-untyped-call, unused-ignore]
    return [layout.views(everything[start + slot * size : start + (slot + 1) * size]) for slot in range(slots)]


def memory_size(layout: SlotLayout, slots: int) -> int:
    """Bytes of the board and the slots."""
    return Board.size(slots) + slots * layout.size()


def _bytes(dtype: torch.dtype, shape: torch.Size) -> int:
    return _rounded_up(shape.numel() * _item_size(dtype), _ALIGNMENT)


def _item_size(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
