"""The data fetcher process iterates over a data set, combines its batches, and copies them into the ring buffer.

The worker processes of a loader transfer their batches to it in memory that both map once: torch sends each tensor of a
batch in its own shared memory segment and fetches its descriptor through a socket. This costs more than the batch
itself if it is small, and leaves a directory on disk if a worker is killed. A batch that does not fit the memory, e.g.
a short last batch, is pickled. Neither side waits for the other here.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import multiprocessing
import os
import pickle
import random
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import torch
from torch.utils.data import default_collate, get_worker_info

from poptorch.data.ring import (
    END,
    Entry,
    Event,
    RingHeader,
    SharedMemory,
    SlotLayout,
    SlotWriter,
    map_slots,
    memory_size,
)
from poptorch.errors import Error
from poptorch.pytree import TreeSpec, flatten, flatten_element, registerCustomArgParser, registered_parsers

_POLL_INTERVAL_S = 0.5  # a waiting fetcher checks this often whether its parent is alive


@dataclass(frozen=True)
class Settings:
    """How to load.

    Attributes:
        slots: slots of the ring buffer.
        load_indefinitely: load the next epoch before it is requested.
        early_preload: load the first epoch before it is requested, not only its first element.
        rebatched_size: samples of an element of the ring buffer; None for the data set's own elements.
        drop_last: with `rebatched_size`, drop a shorter last element.
    """

    slots: int
    load_indefinitely: bool
    early_preload: bool
    rebatched_size: Optional[int]
    drop_last: bool


@dataclass(frozen=True)
class Channels:
    """The connections between the fetcher and the process that reads.

    Attributes:
        reports: one `Ready`, and a `Failure` if the fetcher fails.
    """

    memory: SharedMemory
    data_ready: Event
    slot_free: Event
    reports: Connection


@dataclass(frozen=True)
class Ready:
    """The ring buffer has the first element, which determines the layout and the spec."""

    layout: SlotLayout
    spec: TreeSpec


@dataclass(frozen=True)
class Failure:
    """Why the fetcher failed; `message` has the traceback of an error of the data set."""

    message: str


@dataclass(frozen=True)
class ProcessState:
    """The parent's start method, registered parsers and random number generators, to restore in the fetcher.

    A forked process inherits them; restored in all others, every sharing strategy loads the same samples.
    """

    start_method: str
    parsers: Dict[type, Any]
    torch_rng: torch.Tensor
    python_rng: Any
    numpy_rng: Any

    @classmethod
    def of_this_process(cls) -> ProcessState:
        """Return the present state."""
        numpy = sys.modules.get("numpy")
        numpy_rng = None if numpy is None else numpy.random.get_state()
        start_method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
        return cls(start_method, registered_parsers(), torch.get_rng_state(), random.getstate(), numpy_rng)

    def restore(self) -> None:
        """Set the state of this process."""
        multiprocessing.set_start_method(self.start_method, force=True)
        for kind, parser in self.parsers.items():
            registerCustomArgParser(kind, parser)
        torch.set_rng_state(self.torch_rng)
        random.setstate(self.python_rng)
        if self.numpy_rng is not None:
            import numpy  # only if the parent has imported it

            numpy.random.set_state(self.numpy_rng)


class _Stopped(Exception):
    """The reader stopped the fetcher, or has exited."""


class _Abandoned(Exception):
    """The reader requested a later epoch."""


class _Fetcher:
    """Loads one epoch after the other, as far ahead as the settings and the ring buffer allow."""

    def __init__(self, channels: Channels, settings: Settings, header: RingHeader) -> None:
        self._channels, self._settings, self._header = channels, settings, header
        self._parent = os.getppid()
        self._epoch = 1
        self._elements = 0  # loaded of this epoch
        self._entries: Deque[int] = collections.deque()  # indices of the entries whose slots may be in use
        self._filled = 0  # slots filled so far
        self._writer: Optional[SlotWriter] = None

    def serve(self, dataset: Any) -> None:
        """Load until the reader stops the fetcher."""
        with contextlib.suppress(_Stopped):
            while True:
                with contextlib.suppress(_Abandoned):
                    self._load_epoch(dataset)
                self._epoch = max(self._epoch + 1, self._header.requested_epoch)
                # A data set that can be iterated once has empty epochs from the second on: do not prefetch those.
                prefetches = self._settings.load_indefinitely and self._elements > 0
                self._elements = 0
                if not prefetches:
                    self._wait_until(self._is_requested)

    def _load_epoch(self, dataset: Any) -> None:
        if self._writer is not None:
            self._writer.discard_partial()
        for element in dataset:
            tensors, spec = flatten_element(element)
            if self._writer is None:
                self._writer = self._open_ring(tensors, spec)
            self._writer.write(tensors, spec)
            self._elements += 1
            del element, tensors
            self._wait_until(self._may_load)
        if self._writer is None:
            raise Error("The data set is empty: there is no element to load asynchronously")
        self._writer.end_epoch()
        self._publish(END, 0)

    def _open_ring(self, tensors: List[torch.Tensor], spec: TreeSpec) -> SlotWriter:
        writer = SlotWriter(tensors, spec, self._settings.rebatched_size, self._settings.drop_last)
        self._channels.memory.resize(memory_size(writer.layout, self._settings.slots))
        slots = map_slots(self._channels.memory, writer.layout, self._settings.slots)
        writer.open(slots, self._next_slot, self._publish)
        _send(self._channels.reports, Ready(writer.layout, spec))
        return writer

    def _is_requested(self) -> bool:
        return self._header.requested_epoch >= self._epoch

    def _may_load(self) -> bool:
        ahead = self._settings.early_preload if self._epoch == 1 else self._settings.load_indefinitely
        return ahead or self._is_requested()

    def _next_slot(self) -> int:
        """Wait for a free slot and return its index."""
        self._wait_until(self._has_free_slot)
        return self._filled % self._settings.slots

    def _has_free_slot(self) -> bool:
        consumed = self._header.consumed
        while self._entries and self._entries[0] < consumed:
            self._entries.popleft()
        return len(self._entries) < self._settings.slots

    def _publish(self, rows: int, slot: int) -> None:
        self._wait_until(self._header.has_room)
        if rows != END:
            self._entries.append(self._header.published)
            self._filled += 1
        self._header.publish(Entry(self._epoch, rows, slot))
        self._channels.data_ready.set()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; raise `_Stopped` or `_Abandoned` when the reader exits or requests a later epoch."""
        while True:
            if self._header.must_stop or os.getppid() != self._parent:
                raise _Stopped
            if self._header.requested_epoch > self._epoch:
                raise _Abandoned
            if condition():
                return
            self._channels.slot_free.wait(_POLL_INTERVAL_S)


def run(
    channels: Channels, settings: Settings, state: ProcessState, pickled: Optional[SharedMemory], dataset: Any
) -> None:
    """Run the fetcher; `pickled`, if given, has the data set."""
    header = RingHeader(channels.memory, settings.slots)
    _set_up_process(header)
    try:
        state.restore()
        if pickled is not None:
            dataset = pickle.loads(pickled.map())
        partition = getattr(dataset, "_partition", None)
        if partition is not None:  # the shuffling of a loader's partition is then independent of the reader's loader
            partition.unshare()
        has_workers = isinstance(dataset, torch.utils.data.DataLoader) and dataset.num_workers > 0
        _Fetcher(channels, settings, header).serve(_batches_of_workers(dataset) if has_workers else dataset)
    except KeyboardInterrupt:
        # Stopped while the data set was busy. Its workers may be busy too, so do not wait for them.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for worker in multiprocessing.active_children():
            worker.terminate()
    except Exception as error:  # noqa: BLE001  # the reader raises any error of the data set
        reason = str(error) if isinstance(error, Error) else traceback.format_exc()
        with contextlib.suppress(BrokenPipeError):  # the reader has exited
            _send(channels.reports, Failure(reason))
            channels.data_ready.set()
    finally:
        if isinstance(dataset, torch.utils.data.DataLoader):
            vars(dataset)["_iterator"] = None  # ends its workers


def _batches_of_workers(loader: Any) -> Iterable[Any]:
    """Return the batches of a loader with workers; if it concatenates them, this is done after their transfer."""
    count, vars(loader)["batches_to_combine"] = getattr(loader, "batches_to_combine", 1), 1
    batches = WorkerBatches(loader)
    return CombinedBatches(batches, count, loader.rebatched_drop_last, are_reused=True) if count > 1 else batches


def _set_up_process(header: RingHeader) -> None:
    def on_interrupt(signal_number: int, frame: Any) -> None:
        # Ctrl-C signals all processes of a terminal. The program may continue, so only `stop` ends the fetcher.
        if header.must_stop:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_interrupt)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Threads here would compete with the replica threads, and a fork of a process with such threads would hang.
    torch.set_num_threads(1)


def _send(reports: Connection, report: Any) -> None:
    # By plain pickle, which sends the tensors of an element as bytes; Connection.send would send descriptors.
    reports.send_bytes(pickle.dumps(report))


class CombinedBatches:
    """Iterates over `batches` and concatenates every `count` of them along dimension 0.

    The batches of a combined batch may differ in size. Their dtypes are those of the first one; values that are not
    tensors are those of the last one.

    Args:
        count: the batches of a combined batch.
        drop_last: drop the last combined batch if it has fewer.
        are_reused: the memory of a batch is reused for the next one.
    """

    def __init__(self, batches: Iterable[Any], count: int, drop_last: bool, are_reused: bool = False) -> None:
        self._batches, self._count, self._drop_last, self._are_reused = batches, count, drop_last, are_reused

    def __iter__(self) -> Iterator[Any]:
        parts: List[List[torch.Tensor]] = []
        for batch in self._batches:
            tensors, spec = flatten(batch)
            parts.append([tensor.clone() for tensor in tensors] if self._are_reused else tensors)
            if len(parts) == self._count:
                yield spec.unflatten(_concatenate(parts))
                parts = []
        if parts and not self._drop_last:
            yield spec.unflatten(_concatenate(parts))


def _concatenate(parts: List[List[torch.Tensor]]) -> List[torch.Tensor]:
    """Concatenate the first tensors of all parts, the second ones, and so on."""
    if len(parts) == 1:
        return parts[0]
    return [torch.cat([tensor.to(column[0].dtype) for tensor in column]) for column in zip(*parts)]


_Format = Tuple[SlotLayout, TreeSpec]  # of all batches in the memory


class WorkerBatches:
    """Iterates over a loader with workers and replaces its `collate_fn`. A batch is valid until the next one."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        # The batches that torch lets a worker prefetch, the one being read, and a spare one.
        self._slots = loader.prefetch_factor + 2
        self._memories = [SharedMemory.create(mmap.PAGESIZE) for _ in range(loader.num_workers)]
        self._buffers: Dict[int, Tuple[_WorkerBuffer, TreeSpec]] = {}
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
        is_first = self._format is None and spec.constant is None
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


def stack_into(targets: Sequence[torch.Tensor], spec: TreeSpec, samples: Sequence[Any]) -> bool:
    """Write `default_collate(samples)` into `targets`, without the copy of a batch that is collated elsewhere.

    Returns:
        False if the batch has another spec, or tensors of other shapes or dtypes; `targets` are undefined then.
    """
    columns = _columns(spec, samples)
    if columns is None or len(columns) != len(targets):
        return False
    return all(_fill(target, column) for target, column in zip(targets, columns))


def _columns(spec: TreeSpec, samples: Sequence[Any]) -> Optional[List[Sequence[Any]]]:
    """Return the samples' first items, second items, ...; None for samples that only `default_collate` supports."""
    if spec.kind is torch.Tensor:
        return [samples]
    if spec.kind is dict and all(type(sample) is dict and tuple(sample) == spec.keys for sample in samples):
        return [[sample[key] for sample in samples] for key in spec.keys]
    length = len(spec.children)
    if spec.kind is list and all(type(sample) in (tuple, list) and len(sample) == length for sample in samples):
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
