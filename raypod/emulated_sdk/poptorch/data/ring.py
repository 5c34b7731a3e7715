"""The ring buffer between the data fetcher process and the process that reads, in anonymous shared memory.

The shared memory starts with counters and a queue of entries, followed by the slots, each as large as one element. An
entry is a filled slot, or the end of an epoch. Each counter has one writer, so an interruption of either process leaves
the ring buffer consistent.

The memory and the event of the two processes are open file descriptors: they have no name in /dev/shm or a temporary
directory, so no file remains when a process is killed. They can be pickled for a process that is being started.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import tempfile
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple, Type

import torch

from poptorch.errors import Error
from poptorch.pytree import TreeSpec, described_element


class SharedMemory:
    """Memory that both processes map. After one process has grown it, the other maps it again."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def create(cls, size: int) -> SharedMemory:
        """Return `size` bytes of memory, all 0."""
        memory = cls(_anonymous_file())
        memory.resize(size)
        return memory

    def resize(self, size: int) -> None:
        """Grow the memory to `size` bytes; MemoryError if the host does not have them."""
        try:
            # Allocates now: SIGBUS would kill a process that touches a page without memory.
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError as error:
            raise MemoryError(f"Cannot allocate {size} bytes of shared memory: {error}") from error

    def map(self) -> mmap.mmap:
        """Map the present size of the memory."""
        return mmap.mmap(self._descriptor, 0)

    def close(self) -> None:
        """Close the descriptor; existing maps stay valid."""
        os.close(self._descriptor)

    def __reduce__(self) -> Any:
        return _reopen, (type(self), reduction.DupFd(self._descriptor))


class Event:
    """An event that wakes the process that waits for it, and that `wait` clears.

    An event that is set before the wait ends it at once: check the condition first, then wait.
    """

    def __init__(self, *descriptors: int) -> None:
        self._read, self._write = descriptors
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)

    @classmethod
    def create(cls) -> Event:
        """Return an event that is not set."""
        descriptors = os.pipe()
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
        return cls(*descriptors)

    def set(self) -> None:
        """End the present or the next wait."""
        # A full pipe is set already; without a reader no process waits.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._write, b"\0")

    def wait(self, timeout_s: float) -> None:
        """Wait until the event is set, at most `timeout_s` seconds, and clear it."""
        if self._poll.poll(timeout_s * 1000):
            with contextlib.suppress(BlockingIOError):
                os.read(self._read, 4096)

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self._read)
        os.close(self._write)

    def __reduce__(self) -> Any:
        return _reopen, (type(self), reduction.DupFd(self._read), reduction.DupFd(self._write))


def _reopen(kind: Type[Any], *handles: Any) -> Any:
    return kind(*(handle.detach() for handle in handles))


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("poptorch_ring")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


_ALIGNMENT = 64  # of tensors, in bytes: a cache line
_NUMBERS_PER_ENTRY = 3

END = -1  # `rows` of the entry that ends an epoch
WHOLE = -2  # `rows` of an element that fills its slot


class Entry(NamedTuple):
    """A filled slot, or the end of an epoch.

    Attributes:
        rows: size of dimension 0 of every tensor; WHOLE; or END.
    """

    epoch: int
    rows: int
    slot: int


class RingHeader:
    """Counters and entries at the start of the memory: int64 numbers, each with one writer."""

    # written by the fetcher
    _PUBLISHED = 0
    # written by the reader
    _CONSUMED, _REQUESTED_EPOCH, _STOP = 1, 2, 3
    _NUMBERS = 4

    def __init__(self, memory: SharedMemory, slots: int) -> None:
        # Each slot may be the only element of an epoch, so there may be one end per slot.
        self._capacity = 2 * slots + 1
        self._numbers = memoryview(memory.map()).cast("q")

    @staticmethod
    def size(slots: int) -> int:
        """Return the bytes of the header, in whole pages."""
        numbers = RingHeader._NUMBERS + _NUMBERS_PER_ENTRY * (2 * slots + 1)
        return _round_up(8 * numbers, mmap.PAGESIZE)

    @property
    def published(self) -> int:
        """Number of entries written so far."""
        return self._numbers[self._PUBLISHED]

    @property
    def consumed(self) -> int:
        """Number of entries that the reader has released, with their slots."""
        return self._numbers[self._CONSUMED]

    @consumed.setter
    def consumed(self, count: int) -> None:
        self._numbers[self._CONSUMED] = count

    @property
    def requested_epoch(self) -> int:
        """The epoch that the reader reads, from 1; 0 before the first."""
        return self._numbers[self._REQUESTED_EPOCH]

    @requested_epoch.setter
    def requested_epoch(self, epoch: int) -> None:
        self._numbers[self._REQUESTED_EPOCH] = epoch

    @property
    def must_stop(self) -> bool:
        """Whether the reader has called `stop`."""
        return bool(self._numbers[self._STOP])

    def stop(self) -> None:
        """Request the fetcher to exit."""
        self._numbers[self._STOP] = 1

    def has_room(self) -> bool:
        """Return whether another entry can be published."""
        return self.published - self.consumed < self._capacity

    def publish(self, entry: Entry) -> None:
        """Write the next entry; its slot must be complete."""
        published = self.published
        start = self._start(published)
        self._numbers[start], self._numbers[start + 1], self._numbers[start + 2] = entry
        self._numbers[self._PUBLISHED] = published + 1

    def entry(self, index: int) -> Entry:
        """Return an entry that was published and not yet consumed."""
        start = self._start(index)
        return Entry(*self._numbers[start : start + _NUMBERS_PER_ENTRY])

    def _start(self, index: int) -> int:
        return self._NUMBERS + _NUMBERS_PER_ENTRY * (index % self._capacity)


@dataclass(frozen=True)
class SlotLayout:
    """Dtype and shape of each tensor of an element; a slot stores them one after the other."""

    tensors: Tuple[Tuple[torch.dtype, torch.Size], ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> SlotLayout:
        """Return the layout of an element with these tensors."""
        return cls(tuple((tensor.dtype, tensor.shape) for tensor in tensors))

    def size(self) -> int:
        """Return the bytes of a slot."""
        return sum(_bytes(dtype, shape) for dtype, shape in self.tensors)

    def views(self, memory: torch.Tensor) -> List[torch.Tensor]:
        """Return the tensors of the slot in `memory` [bytes] uint8, as views."""
        views, start = [], 0
        for dtype, shape in self.tensors:
            length = shape.numel() * _item_size(dtype)
            views.append(memory[start : start + length].view(dtype).view(shape))
            start += _bytes(dtype, shape)
        return views


def map_slots(memory: SharedMemory, layout: SlotLayout, slots: int) -> List[List[torch.Tensor]]:
    """Return the tensors of every slot, as views of the memory behind the header; it must be large enough."""
    size, start = layout.size(), RingHeader.size(slots)
    everything = torch.frombuffer(memory.map(), dtype=torch.uint8)  # type: ignore[no-untyped-call, unused-ignore]
    return [layout.views(everything[start + slot * size : start + (slot + 1) * size]) for slot in range(slots)]


def memory_size(layout: SlotLayout, slots: int) -> int:
    """Return the bytes of the header and the slots."""
    return RingHeader.size(slots) + slots * layout.size()


class SlotWriter:
    """Copies elements into slots: each into one slot, or with `rebatched_size` joined into slots of that many samples.

    All elements must have the spec of the first, and tensors that can be expanded to its shapes, as PopTorch copies
    them; with `rebatched_size` the same shapes except for dimension 0. Other dtypes are converted to the first one's.

    Raises:
        Error: with `rebatched_size`, the tensors of the first element differ in dimension 0, or are larger.
    """

    def __init__(
        self, first: List[torch.Tensor], spec: TreeSpec, rebatched_size: Optional[int], drop_last: bool
    ) -> None:
        self._spec = spec
        self._rebatched_size = rebatched_size
        self._drop_last = drop_last
        self._slots: List[List[torch.Tensor]] = []
        self._slot: Optional[int] = None  # the partially filled slot
        self._samples = 0  # samples in it
        self.layout = SlotLayout.of(first)
        if rebatched_size is not None:
            if _samples(first) > rebatched_size:
                raise Error(
                    f"rebatched_size={rebatched_size}: the first element of the data set has {_samples(first)} "
                    "samples, more than an element of the ring buffer"
                )
            shapes = [torch.Size((rebatched_size, *tensor.shape[1:])) for tensor in first]
            self.layout = SlotLayout(tuple((tensor.dtype, shape) for tensor, shape in zip(first, shapes)))

    def open(
        self, slots: List[List[torch.Tensor]], next_slot: Callable[[], int], publish: Callable[[int, int], None]
    ) -> None:
        """Set the slots to write; `next_slot()` waits for a free one, `publish(rows, slot)` hands it to the reader."""
        self._slots, self._next_slot, self._publish = slots, next_slot, publish

    def write(self, tensors: List[torch.Tensor], spec: TreeSpec) -> None:
        """Copy one element; Error if it does not match the first."""
        self._check(tensors, spec)
        if self._rebatched_size is None:
            self._write_whole(tensors)
        else:
            self._join(tensors, self._rebatched_size)

    def end_epoch(self) -> None:
        """Publish the partially filled slot, or discard it with `drop_last`."""
        if self._slot is not None and self._samples and not self._drop_last:
            self._publish(self._samples, self._slot)
        self.discard_partial()

    def discard_partial(self) -> None:
        """Discard the partially filled slot."""
        self._slot, self._samples = None, 0

    def _write_whole(self, tensors: List[torch.Tensor]) -> None:
        slot = self._next_slot()
        for target, tensor in zip(self._slots[slot], tensors):
            target.copy_(tensor)
        self._publish(WHOLE, slot)

    def _join(self, tensors: List[torch.Tensor], size: int) -> None:
        samples, done = _samples(tensors), 0
        while done < samples:
            if self._slot is None:
                self._slot = self._next_slot()
            count = min(samples - done, size - self._samples)
            for target, tensor in zip(self._slots[self._slot], tensors):
                target[self._samples : self._samples + count].copy_(tensor[done : done + count])
            done += count
            self._samples += count
            if self._samples == size:
                self._publish(WHOLE, self._slot)
                self.discard_partial()

    def _check(self, tensors: List[torch.Tensor], spec: TreeSpec) -> None:
        if spec != self._spec or len(tensors) != len(self.layout.tensors):
            first, other = described_element(self._spec), described_element(spec)
            raise Error(f"An element is {other}, but the first element is {first}")
        for index, (tensor, (_, shape)) in enumerate(zip(tensors, self.layout.tensors)):
            if self._rebatched_size is None:
                fits = _is_expandable(tensor.shape, shape)
            else:
                fits = tensor.dim() > 0 and tensor.shape[1:] == shape[1:]
            if not fits:
                raise Error(
                    f"Tensor {index} of an element is {list(tensor.shape)}, but the slots of the ring buffer are "
                    f"{list(shape)}: all elements must match the first"
                )


def _is_expandable(shape: torch.Size, to: torch.Size) -> bool:
    """Return whether a tensor of this shape can be copied to one of the shape `to`."""
    return len(shape) <= len(to) and all(size in (1, other) for size, other in zip(shape[::-1], to[::-1]))


def _samples(tensors: List[torch.Tensor]) -> int:
    """Return the size of dimension 0, which all tensors must share; Error if they do not."""
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    size = sizes.pop() if len(sizes) == 1 else None
    if size is None:
        raise Error(
            f"The tensors of a batch have the shapes {[list(tensor.shape) for tensor in tensors]}: rebatching "
            "needs the same number of samples in dimension 0 of all tensors"
        )
    return size


def _bytes(dtype: torch.dtype, shape: torch.Size) -> int:
    return _round_up(shape.numel() * _item_size(dtype), _ALIGNMENT)


def _item_size(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
