"""What a process does, in memory that the other processes of this host can read.

The Poplar SDK holds the interpreter lock while it attaches, loads and executes, so that no thread of a program answers
then. Its record answers: it lies in an anonymous file that ends with the process, which `/proc/PID/fd` opens.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import mmap
import os
import signal
import struct
import time
import zlib
from pathlib import Path
from typing import IO, NamedTuple, Optional

from raypod.system.process import cpu_seconds_of_thread, is_stopped, process_start_ticks

_FIELDS = struct.Struct("<d q d q 80s")  # since, calls, slowest call, thread, activity
_CHECKSUM = struct.Struct("<I")
_BYTES = _FIELDS.size + _CHECKSUM.size
_READS = 5  # the process may be writing
_STACK_SIGNAL = signal.SIGUSR2
_STACK_S, _STACK_POLL_S = 1.0, 0.05
_STACK_BYTES = 1 << 16


class Identity(NamedTuple):
    """A process of a host, and where its record is."""

    pid: int
    start_ticks: int  # since boot: the pid can be reused
    record: int  # descriptors of the process
    stacks: int


class Activity(NamedTuple):
    """What a process does."""

    name: str
    duration_s: float
    calls: int  # finished by the process
    slowest_call_s: Optional[float]
    cpu_s: float  # of the thread that works


class ActivityRecord:
    """The record of this process. `SIGUSR2` writes the stacks of all its threads into a second anonymous file.

    The handler is faulthandler's: it needs no interpreter lock.
    """

    def __init__(self) -> None:
        self._file, self._stacks = anonymous_file("raypod-activity"), anonymous_file("raypod-stacks")
        self._file.truncate(_BYTES)
        self._map = mmap.mmap(self._file.fileno(), _BYTES)
        faulthandler.register(_STACK_SIGNAL, file=self._stacks, all_threads=True)

    @property
    def identity(self) -> Identity:
        """The identity of this process."""
        pid = os.getpid()
        return Identity(pid, process_start_ticks(pid) or 0, self._file.fileno(), self._stacks.fileno())

    def write(self, activity: str, since_s: float, calls: int, slowest_call_s: Optional[float], thread: int) -> None:
        """Replace the record; `thread` is the native id of the thread that works."""
        slowest = math.nan if slowest_call_s is None else slowest_call_s
        fields = _FIELDS.pack(since_s, calls, slowest, thread, activity.encode()[:80])
        self._map[:] = fields + _CHECKSUM.pack(zlib.crc32(fields))


def read(identity: Identity) -> Optional[Activity]:
    """Return what a process of this host does; None if it has ended, is stopped (SIGSTOP), or has no record yet."""
    if process_start_ticks(identity.pid) != identity.start_ticks or is_stopped(identity.pid):
        return None
    for _ in range(_READS):
        with contextlib.suppress(OSError, struct.error):
            content = path_of(identity.pid, identity.record).read_bytes()
            fields, checksum = content[: _FIELDS.size], content[_FIELDS.size :]
            if _CHECKSUM.pack(zlib.crc32(fields)) == checksum:
                since_s, calls, slowest, thread, name = _FIELDS.unpack(fields)
                cpu_s = cpu_seconds_of_thread(identity.pid, thread)
                text = name.rstrip(b"\0").decode(errors="replace")
                slowest_s = None if math.isnan(slowest) else slowest
                return Activity(text, time.monotonic() - since_s, calls, slowest_s, cpu_s)
    return None


def stacks(identity: Identity) -> str:
    """Return the stacks of all threads of a process of this host, as faulthandler prints them; "" if it has none."""
    if process_start_ticks(identity.pid) != identity.start_ticks:
        return ""
    path = path_of(identity.pid, identity.stacks)
    with contextlib.suppress(OSError):
        before = size = path.stat().st_size
        os.kill(identity.pid, _STACK_SIGNAL)
        deadline = time.monotonic() + _STACK_S
        while time.monotonic() < deadline:
            time.sleep(_STACK_POLL_S)
            last, size = size, path.stat().st_size
            if before < size == last:
                break
        with path.open("rb") as file:
            file.seek(before)
            return file.read(_STACK_BYTES).decode(errors="replace")
    return ""


def anonymous_file(name: str) -> IO[bytes]:
    """Return a new file without a buffer. It ends with this process, however that ends; `name` is for `ls /proc`."""
    return os.fdopen(os.memfd_create(name), "r+b", buffering=0)


def path_of(pid: int, descriptor: int) -> Path:
    """Return the path by which other processes of the same user open a file of process `pid`."""
    return Path(f"/proc/{pid}/fd/{descriptor}")
