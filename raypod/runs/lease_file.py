"""The files of leases: which process holds a folder, and whether it still does.

The holder is described by the file `lease-<number>.json`; a lease with a higher number ends those with lower ones. The
file's modification time is the holder's last heartbeat, in the clock of the file system: the wall clocks of two hosts
are never compared. No lock of the file system is used. A lease ends when its holder releases it, at once when its
process on this host has ended, and otherwise when it has no heartbeat for EXPIRES_AFTER_S.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import socket
import time
import uuid
from pathlib import Path
from typing import Callable, List, Optional

from raypod.errors import LeaseHeld
from raypod.system.files import new_file, parse_json
from raypod.system.process import process_start_ticks

HEARTBEAT_S = 5.0
EXPIRES_AFTER_S = 30.0
POLL_S = 0.2
_ABANDONED_S = 600.0  # age at which a temporary file has no writer any more; it waits 30 s for a heartbeat
GONE = (errno.ENOENT, errno.ESTALE)
_BOOT_ID, _PID_NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
_NAME = re.compile(r"\.?lease-(?:(\d+)\.json|\w+\.partial)$")
Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that holds a lease: the content of the file."""

    owner: str  # unique for each lease
    host: str
    machine: str  # its boot and pid namespace, within which pids can be compared
    pid: int
    started_ticks: int  # start time of the process, in clock ticks since boot
    since: str  # when it acquired the lease, in the local time of its host
    expires_after_s: float

    @property
    def is_local(self) -> bool:
        """Whether it is a process of this host."""
        return (self.host, self.machine) == (socket.gethostname(), _machine())

    @property
    def has_ended(self) -> bool:
        """Whether it is a process of this host that has ended."""
        return self.is_local and process_start_ticks(self.pid) != self.started_ticks

    def with_pid(self, pid: int) -> Holder:
        """Return the holder with another process of this host."""
        return dataclasses.replace(self, pid=pid, started_ticks=process_start_ticks(pid) or 0)

    def content(self) -> bytes:
        """Return the content of its file."""
        return (json.dumps(dataclasses.asdict(self), indent=2) + "\n").encode()


def this_process() -> Holder:
    """Return a new holder: this process."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    holder = Holder(uuid.uuid4().hex, socket.gethostname(), _machine(), 0, 0, since, EXPIRES_AFTER_S)
    return holder.with_pid(os.getpid())


def _machine() -> str:
    return f"{_BOOT_ID.read_text().strip()} {os.readlink(_PID_NAMESPACE)}"


@dataclasses.dataclass(frozen=True)
class LeaseFile:
    """A lease as another process reads it. `holder` is None if its file cannot be parsed: it is being written."""

    path: Path
    holder: Optional[Holder]
    renewed_s: float  # time of the last heartbeat in the clock of the file system, in seconds since 1970

    @property
    def number(self) -> int:
        """The number in its name."""
        return number_of(self.path.name)

    @property
    def owner(self) -> str:
        """The holder's identifier; empty if it is unknown."""
        return self.holder.owner if self.holder else ""

    @property
    def expires_after_s(self) -> float:
        """The time without a heartbeat after which it ends."""
        return self.holder.expires_after_s if self.holder else EXPIRES_AFTER_S

    def __str__(self) -> str:
        if self.holder is None:
            return "another command"
        return f"pid {self.holder.pid} on host {self.holder.host} (since {self.holder.since})"


def is_lease(name: str) -> bool:
    """Return whether a file name is that of a lease, or of one that is being written."""
    return _NAME.match(name) is not None


def number_of(name: str) -> int:
    """Return the number in the file name of a lease; 0 for other files."""
    found = _NAME.match(name)
    return int(found.group(1) or 0) if found else 0


def find(folder: Path) -> List[LeaseFile]:
    """Return the leases of a folder by number, including those that have expired."""
    numbers = sorted(filter(None, (number_of(path.name) for path in folder.iterdir())))
    found = (read(folder / f"lease-{number}.json") for number in numbers)
    return [each for each in found if each is not None]


def current(folder: Path) -> Optional[LeaseFile]:
    """Return the newest lease of a folder, which may have expired; None if it has none."""
    found = find(folder)
    return found[-1] if found else None


def read(path: Path) -> Optional[LeaseFile]:
    """Return a lease; None if it does not exist."""
    try:
        with path.open("rb") as file:  # opening a file makes NFS fetch its current attributes
            text, renewed_s = file.read(), os.fstat(file.fileno()).st_mtime
    except OSError as error:
        if error.errno in GONE:
            return None
        raise
    try:
        return LeaseFile(path, Holder(**parse_json(text.decode())), renewed_s)
    except (ValueError, TypeError):
        return LeaseFile(path, None, renewed_s)


def abandoned(folder: Path, now_s: float) -> List[Path]:
    """Return the temporary files whose writers were killed. `now_s` is the time of the file system's clock."""
    found = []
    for path in folder.iterdir():
        file = read(path) if is_lease(path.name) and not number_of(path.name) else None
        if file is not None and ((file.holder and file.holder.has_ended) or now_s - file.renewed_s > _ABANDONED_S):
            found.append(path)
    return found


def publish(partial: Path, path: Path, holder: Holder) -> bool:
    """Give the complete file `partial` the name `path`, unless that exists. Return whether this call created it."""
    try:
        os.link(str(partial), str(path))
    except FileExistsError:
        found = read(path)  # NFS reports an existing file if it repeats a request whose reply was lost
        return found is not None and found.owner == holder.owner
    except OSError:  # a file system without hard links
        try:
            with new_file(path) as file:
                file.write(holder.content())
        except FileExistsError:
            return False
    return True


def remove(path: Path) -> None:
    """Remove a lease; if the disk is not available, it expires."""
    with contextlib.suppress(OSError):
        path.unlink()


def has_ended(file: LeaseFile, now_s: float, log: Log) -> bool:
    """Return whether a lease is no longer valid; this may take a while, about which `log` prints a line.

    `now_s` is the time of the file system's clock. The age of a lease is only trusted if it is below the expiry:
    otherwise the lease is observed, because on some file systems each host sets the times of files by its own clock.
    """
    if file.holder is not None and file.holder.is_local:
        return file.holder.has_ended
    age_s = now_s - file.renewed_s
    if -HEARTBEAT_S <= age_s < file.expires_after_s:
        return False
    observe_s = 2 * HEARTBEAT_S if age_s > 0 else file.expires_after_s
    log(f"{file.path}: waiting {observe_s:g} s for a heartbeat of {file}; by its time, the last one is {_seen(age_s)}")
    deadline = time.monotonic() + observe_s
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        now = read(file.path)
        if now is not None and now.renewed_s != file.renewed_s:
            return False
    return True


def _seen(age_s: float) -> str:
    return f"{age_s:.0f} s old" if age_s >= 0 else f"{-age_s:.0f} s ahead of the clock here"


def held(file: LeaseFile, now_s: float, hint: str) -> LeaseHeld:
    """Return the error for a lease that is valid at the time `now_s` of the file system's clock."""
    expiry = ""
    if file.holder is None or not file.holder.is_local:
        age_s = max(0.0, now_s - file.renewed_s)
        expiry = f", last heartbeat {age_s:.0f} s ago; it expires after {file.expires_after_s:g} s without one"
    return LeaseHeld(str(file.path.parent), f"{file}{expiry}", hint)
