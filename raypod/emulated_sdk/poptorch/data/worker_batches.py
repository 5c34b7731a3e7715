"""Transfer batches from a loader's worker processes to the data fetcher in memory that both map once.

torch sends each tensor of a batch in its own shared memory segment and fetches its descriptor through a socket. This
costs more than the batch itself if it is small, and leaves a directory on disk if a worker is killed. A batch that
does not fit the memory, e.g. a short last batch, is pickled. Neither side waits for the other here.
"""

from __future__ import annotations

import mmap
import pickle
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch.utils.data import default_collate, get_worker_info

from poptorch.data.ring import SlotLayout, map_slots, memory_size
from poptorch.data.shared_memory import SharedMemory
from poptorch.errors import Error
from poptorch.pytree import ElementSpec, flatten_element

_Format = Tuple[SlotLayout, ElementSpec]  # of all batches in the memory


class WorkerBatches:
    """Iterates over a loader with workers and replaces its `collate_fn`. A batch is valid until the next one."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        # The batches that torch lets a worker prefetch, the one being read, and a spare one.
        self._slots = loader.prefetch_factor + 2
        self._memories = [SharedMemory.create(mmap.PAGESIZE) for _ in range(loader.num_workers)]
        self._buffers: Dict[int, Tuple[_WorkerBuffer, ElementSpec]] = {}
        vars(loader)["collate_fn"] = _SharedMemoryCollate(loader.collate_fn, self._memories, self._slots)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if isinstance(batch, _Stored):
                yield from self._read(batch)
            else:
                if batch.worker in self._buffers:
                    self._buffers[batch.worker][0].consumed = batch.number
                yield pickle.loads(batch.element)

    def _read(self, batch: _Stored) -> Iterator[Any]:
        if batch.format is not None:
            layout, spec = batch.format
            self._buffers[batch.worker] = _WorkerBuffer(self._memories[batch.worker], layout, self._slots), spec
        buffer, spec = self._buffers[batch.worker]
        try:
            yield spec.unflatten(buffer.slot(batch.number))
        finally:
            buffer.consumed = batch.number + 1


@dataclass(frozen=True)
class _Stored:
    """A batch in the memory of `worker`, the `number`-th there. `format` is sent with the first."""

    worker: int
    number: int
    format: Optional[_Format]


@dataclass(frozen=True)
class _Pickled:
    """A pickled batch, made after the worker had stored `number` others."""

    worker: int
    number: int
    element: bytes


class _WorkerBuffer:
    """The slots of one worker's memory, and the number of consumed batches. Both sides have one."""

    def __init__(self, memory: SharedMemory, layout: SlotLayout, slots: int) -> None:
        self._numbers = memoryview(memory.map()).cast("q")
        self._slots = map_slots(memory, layout, slots)

    @property
    def consumed(self) -> int:
        """All batches before this number are free, including those that were never read."""
        return self._numbers[0]

    @consumed.setter
    def consumed(self, number: int) -> None:
        self._numbers[0] = number

    def is_free(self, number: int) -> bool:
        """Return whether the slot of this batch is free."""
        return number - self.consumed < len(self._slots)

    def slot(self, number: int) -> List[torch.Tensor]:
        """Return the tensors of the slot of this batch."""
        return self._slots[number % len(self._slots)]


class _SharedMemoryCollate:
    """A loader's `collate_fn` that stores each batch in the worker's memory."""

    def __init__(self, collate: Callable[[Any], Any], memories: List[SharedMemory], slots: int) -> None:
        self._collate, self._memories, self._slots = collate, memories, slots
        self._buffer: Optional[_WorkerBuffer] = None
        self._format: Optional[_Format] = None
        self._number = 0  # of the next batch to be stored

    def __call__(self, samples: Any) -> Any:
        """Return the `_Stored` or `_Pickled` batch."""
        info = get_worker_info()
        worker = 0 if info is None else info.id
        if self._stack(samples):
            return self._stored(worker, None)
        element = self._collate(samples)
        try:
            tensors, spec = flatten_element(element)
        except Error:
            return self._pickled(worker, element)  # the fetcher raises the same error
        found = (SlotLayout.of(tensors), spec)
        is_first = self._format is None and spec.original is None
        if is_first:
            self._open(worker, found)
        if found != self._format or self._buffer is None or not self._buffer.is_free(self._number):
            return self._pickled(worker, element)
        for target, tensor in zip(self._buffer.slot(self._number), tensors):
            target.copy_(tensor)
        return self._stored(worker, found if is_first else None)

    def _stack(self, samples: Any) -> bool:
        """Collate directly into the free slot; return False if that is not possible."""
        if self._collate is not default_collate or self._buffer is None or self._format is None:
            return False
        is_free = self._buffer.is_free(self._number)
        return is_free and stack_into(self._buffer.slot(self._number), self._format[1], samples)

    def _stored(self, worker: int, new_format: Optional[_Format]) -> _Stored:
        self._number += 1
        return _Stored(worker, self._number - 1, new_format)

    def _open(self, worker: int, new_format: _Format) -> None:
        memory = self._memories[worker]
        memory.resize(memory_size(new_format[0], self._slots))
        self._buffer, self._format = _WorkerBuffer(memory, new_format[0], self._slots), new_format
        self._buffer.consumed = 0

    def _pickled(self, worker: int, element: Any) -> _Pickled:
        return _Pickled(worker, self._number, pickle.dumps(element))


def stack_into(targets: Sequence[torch.Tensor], spec: ElementSpec, samples: Sequence[Any]) -> bool:
    """Write `default_collate(samples)` into `targets`, without the copy of a batch that is collated elsewhere.

    Returns:
        False if the batch has another spec, or tensors of other shapes or dtypes; `targets` are undefined then.
    """
    columns = _columns(spec, samples)
    if columns is None or len(columns) != len(targets):
        return False
    return all(_fill(target, column) for target, column in zip(targets, columns))


def _columns(spec: ElementSpec, samples: Sequence[Any]) -> Optional[List[Sequence[Any]]]:
    """Return the samples' first items, second items, ...; None for samples that only `default_collate` supports."""
    if spec.type is torch.Tensor:
        return [samples]
    if spec.type is dict and all(type(sample) is dict and tuple(sample) == spec.keys for sample in samples):
        return [[sample[key] for sample in samples] for key in spec.keys]
    if spec.type is list and all(type(sample) in (tuple, list) and (len(sample),) == spec.keys for sample in samples):
        return list(zip(*samples))
    return None


def _fill(target: torch.Tensor, column: Sequence[Any]) -> bool:
    if len(column) != target.shape[0]:
        return False
    if all(type(item) in (int, float) for item in column):
        numbers = default_collate(list(column))
        if numbers.dtype != target.dtype or numbers.shape != target.shape:
            return False
        target.copy_(numbers)
        return True
    shape, dtype = target.shape[1:], target.dtype
    for item in column:
        matches = type(item) is torch.Tensor and item.dtype == dtype and item.shape == shape
        if not matches or item.requires_grad or item.layout != torch.strided:
            return False
    torch.stack(tuple(column), out=target)
    return True
