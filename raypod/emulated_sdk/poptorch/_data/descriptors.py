"""What two processes of one host share: memory that has no name, and a bell to wake the other with.

Both are open file descriptors: nothing lies in /dev/shm or a temporary folder, so nothing is left there however the
processes end. Sent to a process that is being started, they open the same memory and the same bell there.
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
    """Bytes that both processes map. One may let them grow; the other maps them again to see more."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def create(cls, size: int) -> SharedMemory:
        """`size` bytes, all 0."""
        memory = cls(_anonymous_file())
        memory.resize(size)
        return memory

    def resize(self, size: int) -> None:
        """Let it hold `size` bytes. MemoryError when the host has not so many."""
        try:
            # Taken now: a process that touched a page for which there is no memory would be killed.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._descriptor, 0, size)
            else:
                os.ftruncate(self._descriptor, size)
        except OSError as error:
            raise MemoryError(f"No {size} bytes of shared memory for the ring buffer: {error}") from error

    def map(self) -> mmap.mmap:
        """All the bytes it holds now."""
        return mmap.mmap(self._descriptor, 0)

    def close(self) -> None:
        """Give up the descriptor; what is mapped stays."""
        os.close(self._descriptor)

    def __reduce__(self) -> Any:
        return _reopen, (type(self), reduction.DupFd(self._descriptor))


class Bell:
    """Wakes a process that waits. A bell rung early is heard at the next wait: look first, then wait."""

    def __init__(self, *descriptors: int) -> None:
        self._read, self._write = descriptors
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)

    @classmethod
    def create(cls) -> Bell:
        """A silent bell."""
        descriptors = os.pipe()
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
        return cls(*descriptors)

    def ring(self) -> None:
        """Wake whoever waits, now or next."""
        # A full pipe is a bell that was rung often enough; without a reader nobody needs to wake.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._write, b"\0")

    def wait(self, timeout_s: float) -> None:
        """Return when it was rung, after `timeout_s` at the latest."""
        if self._poll.poll(timeout_s * 1000):
            with contextlib.suppress(BlockingIOError):
                os.read(self._read, 4096)

    def close(self) -> None:
        """Give up the descriptors."""
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
