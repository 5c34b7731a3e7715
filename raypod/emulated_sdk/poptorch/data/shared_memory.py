"""Anonymous shared memory, and an event, for two processes of one host.

Both are open file descriptors: they have no name in /dev/shm or a temporary directory, so no file remains when a
process is killed. They can be pickled for a process that is being started.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import tempfile
from multiprocessing import reduction
from typing import Any, Type


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
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._descriptor, 0, size)
            else:
                os.ftruncate(self._descriptor, size)
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
