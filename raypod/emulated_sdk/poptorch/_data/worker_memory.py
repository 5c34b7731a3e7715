"""How batches travel from a loader's workers to the process that loads: in memory that both have mapped once.

torch sends every tensor of a batch in a segment of its own, whose descriptor is fetched through a socket: that costs
more than the batch itself when it is small, and leaves a folder behind when a worker is killed. What has no place in
the memory, a short last batch for one, travels pickled. Nobody waits for anybody here.
"""

from __future__ import annotations

import mmap
import pickle
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch.utils.data import default_collate, get_worker_info

from poptorch._data.descriptors import SharedMemory
from poptorch._data.elements import ElementKind, take_apart
from poptorch._data.ring import SlotLayout, map_slots, memory_size
from poptorch._data.stacking import stack_into
from poptorch._errors import Error


@dataclass(frozen=True)
class _Stored:
    """A worker's batch number `number`, of those that it stored; with the first comes what all are like."""

    worker: int
    number: int
    like: Optional[Tuple[SlotLayout, ElementKind]]


@dataclass(frozen=True)
class _Pickled:
    """A batch that has no place in the memory, made when its worker had stored `number` others."""

    worker: int
    number: int
    element: bytes


class _Room:
    """A worker's memory, as either side sees it: how many batches were taken from it, and the slots."""

    def __init__(self, memory: SharedMemory, layout: SlotLayout, slots: int) -> None:
        self._numbers = memoryview(memory.map()).cast("q")
        self._slots = map_slots(memory, layout, slots)

    @property
    def taken(self) -> int:
        """All batches before this number are done with, those that nobody asked for included."""
        return self._numbers[0]

    @taken.setter
    def taken(self, number: int) -> None:
        self._numbers[0] = number

    def has_place(self, number: int) -> bool:
        """Whether the slot of this batch is free."""
        return number - self.taken < len(self._slots)

    def slot(self, number: int) -> List[torch.Tensor]:
        """Where this batch lies."""
        return self._slots[number % len(self._slots)]


class _StoringCollate:
    """Stands in for a loader's `collate_fn` in its workers: stores what that makes."""

    def __init__(self, collate: Callable[[Any], Any], memories: List[SharedMemory], slots: int) -> None:
        self._collate, self._memories, self._slots = collate, memories, slots
        self._room: Optional[_Room] = None
        self._like: Optional[Tuple[SlotLayout, ElementKind]] = None
        self._number = 0  # of the next batch to be stored

    def __call__(self, samples: Any) -> Any:
        """A stored batch, or a pickled one."""
        info = get_worker_info()
        worker = 0 if info is None else info.id
        if self._is_stacked(samples):
            return self._stored(worker, None)
        element = self._collate(samples)
        try:
            tensors, kind = take_apart(element)
        except Error:
            return self._pickled(worker, element)  # to be refused where it is read
        like = (SlotLayout.of(tensors), kind)
        is_first = self._like is None and kind.original is None
        if is_first:
            self._open(worker, like)
        if like != self._like or self._room is None or not self._room.has_place(self._number):
            return self._pickled(worker, element)
        for target, tensor in zip(self._room.slot(self._number), tensors):
            target.copy_(tensor)
        return self._stored(worker, like if is_first else None)

    def _is_stacked(self, samples: Any) -> bool:
        """Whether the batch could be made where it is stored."""
        if self._collate is not default_collate or self._room is None or self._like is None:
            return False
        has_place = self._room.has_place(self._number)
        return has_place and stack_into(self._room.slot(self._number), self._like[1], samples)

    def _stored(self, worker: int, like: Optional[Tuple[SlotLayout, ElementKind]]) -> _Stored:
        self._number += 1
        return _Stored(worker, self._number - 1, like)

    def _open(self, worker: int, like: Tuple[SlotLayout, ElementKind]) -> None:
        memory = self._memories[worker]
        memory.resize(memory_size(like[0], self._slots))
        self._room, self._like = _Room(memory, like[0], self._slots), like
        self._room.taken = 0

    def _pickled(self, worker: int, element: Any) -> _Pickled:
        return _Pickled(worker, self._number, pickle.dumps(element))


class WorkerBatches:
    """The batches of a loader with workers, which it makes store them; an element is valid until the next."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        # As many as torch lets a worker make ahead, the one that is read, and one to spare.
        self._slots = loader.prefetch_factor + 2
        self._memories = [SharedMemory.create(mmap.PAGESIZE) for _ in range(loader.num_workers)]
        self._rooms: Dict[int, Tuple[_Room, ElementKind]] = {}
        vars(loader)["collate_fn"] = _StoringCollate(loader.collate_fn, self._memories, self._slots)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if isinstance(batch, _Stored):
                yield from self._read(batch)
            else:
                if batch.worker in self._rooms:
                    self._rooms[batch.worker][0].taken = batch.number
                yield pickle.loads(batch.element)

    def _read(self, batch: _Stored) -> Iterator[Any]:
        if batch.like is not None:
            layout, kind = batch.like
            self._rooms[batch.worker] = _Room(self._memories[batch.worker], layout, self._slots), kind
        room, kind = self._rooms[batch.worker]
        try:
            yield kind.build(room.slot(batch.number))
        finally:
            room.taken = batch.number + 1
