"""Hold the lease of a folder: acquire it, renew it in a thread, take it over, hand it over, release it.

At most one process at a time holds it, among all hosts that share the folder's disk. The holder is described by the
file `lease-<number>.json`; a lease with a higher number ends those with lower ones. The file's modification time is the
holder's last heartbeat, in the clock of the file system: the wall clocks of two hosts are never compared. No lock of
the file system is used. A lease ends when its holder releases it, at once when its process on this host has ended, and
otherwise when it has no heartbeat for EXPIRES_AFTER_S.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import signal
import socket
import threading
import time
import uuid
from pathlib import Path
from types import FrameType
from typing import Callable, Iterator, List, Optional, Tuple

from raypod.errors import FolderLost, LeaseHeld, LeaseLost
from raypod.system.files import HeldFolder, new_file, parse_json, replace_file
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


_END_WITHIN_S = 120.0  # for a holder to end after another process has taken over
_ADOPT_WITHIN_S = 5.0  # for a parent to write the pid of its child
LATE_S = EXPIRES_AFTER_S / 2  # age of the last heartbeat at which the process waits for the next one, and warns
_WAKE_S = 5.0  # for a late heartbeat, before the process goes on without it
_ATTEMPTS = 20


def acquire(folder: Path, hint: str = "", take_over: bool = False, log: Log = print) -> Lease:
    """Acquire the lease of an existing folder, and renew it in the background until it is released.

    Args:
        folder: the folder.
        hint: the end of the message of LeaseHeld.
        take_over: end another holder: it raises LeaseLost, and this call returns when it has ended.
        log: prints lines about waits, and one warning if the disk prevents heartbeats.

    Raises:
        LeaseHeld: another process holds it, or does not end within 120 s after it was taken over.
        OSError: the folder is not writable.
    """
    me = this_process()
    for _ in range(_ATTEMPTS):
        before = find(folder)
        with _partial_file(folder, me) as (partial, now_s):
            live: List[LeaseFile] = []
            for each in reversed(before):
                if not has_ended(each, now_s, log):
                    if not take_over:
                        raise held(each, now_s, hint)
                    live.append(each)
            path = folder / f"lease-{1 + (before[-1].number if before else 0)}.json"
            if not publish(partial, path, me):
                continue
        considered = {me.owner, *(each.owner for each in before)}
        if any(each.owner not in considered for each in find(folder)):
            remove(path)  # another process has acquired it at the same time: examine the folder again
            continue
        lease = Lease(path, me, log)
        _end_holders(live, lease, log)
        return lease
    raise LeaseHeld(str(folder), "several other commands at the same time", hint)


def adopt(folder: Path, owner: str, log: Log = print) -> Lease:
    """Return the lease that the parent of this process has handed over, and renew it in the background.

    Raises:
        LeaseLost: another process has taken over.
        OSError: the folder cannot be read.
    """
    deadline = time.monotonic() + _ADOPT_WITHIN_S
    while True:
        found = current(folder)
        if found is None or found.holder is None or found.owner != owner:
            raise LeaseLost(str(folder), str(found or "another command"))
        if found.holder.pid == os.getpid():
            return Lease(found.path, found.holder, log)
        if time.monotonic() > deadline:  # the parent was killed before it wrote this pid
            holder = found.holder.with_pid(os.getpid())
            replace_file(found.path, holder.content())
            return Lease(found.path, holder, log)
        time.sleep(POLL_S)


class Lease:
    """A lease that this process holds. A thread renews it; `check` raises LeaseLost after another process took over."""

    def __init__(self, path: Path, holder: Holder, log: Log) -> None:
        self._path, self._holder, self._log = path, holder, log
        self._lost: Optional[LeaseLost] = None
        # Called once, in the thread of the lease, instead of an interruption if the folder is lost: the process ends
        # its calls, and then calls `check_folder`.
        self.on_folder_lost: Optional[Callable[[FolderLost], None]] = None
        self._held = HeldFolder(path.parent, mark=path)
        self._renewed_s = time.monotonic()
        self._is_late = self._has_warned = self._has_ended = self._interrupts = False
        self._lock = threading.Lock()  # of _interrupts
        self._wake, self._renewed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._renew_until_end, name="lease", daemon=True)
        self._thread.start()

    @property
    def owner(self) -> str:
        """The identifier with which a child process adopts it."""
        return self._holder.owner

    @property
    def folder(self) -> Path:
        """The folder that it holds."""
        return self._path.parent

    @property
    def is_first(self) -> bool:
        """Whether the folder had no other lease when this one was acquired, not even an expired one."""
        return number_of(self._path.name) == 1

    def remove_ended(self) -> None:
        """Remove the leases before this one, which have ended, and what killed processes have left of theirs."""
        for each in find(self.folder):
            if each.number < number_of(self._path.name):
                remove(each.path)
        own = read(self._path)
        for path in abandoned(self.folder, own.renewed_s) if own is not None else ():
            remove(path)

    def check(self) -> None:
        """Raise LeaseLost if another process has taken over.

        Performs no I/O between two heartbeats. After a pause of this process (it was stopped) it waits for the next
        heartbeat first: another host may have taken over meanwhile.
        """
        if self._age_s() > LATE_S and not self._is_late:
            self._renewed.clear()
            self._wake.set()
            self._is_late = not self._renewed.wait(_WAKE_S)
        if self._lost is not None:
            raise self._lost

    def check_folder(self) -> None:
        """Raise FolderLost if the path of the folder leads elsewhere by now, before something is written into it."""
        if self._held.is_elsewhere():
            raise FolderLost(str(self.folder))

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise LeaseLost in the main thread, if it enters this context, as soon as another process takes over.

        In another thread, which no signal reaches, the context has no effect: `check` raises it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(number: int, frame: Optional[FrameType]) -> None:
            if self._interrupts and self._lost is not None:
                self._interrupts = False
                raise self._lost

        before = signal.signal(signal.SIGUSR2, on_signal)
        self._interrupts = True
        try:
            yield
        finally:
            with self._lock:
                self._interrupts = False
            signal.signal(signal.SIGUSR2, before)

    def hand_over(self, pid: int) -> None:
        """Make a child process the holder. This process renews the lease until `leave` or `release`."""
        self._holder = self._holder.with_pid(pid)
        replace_file(self._path, self._holder.content())

    def leave(self) -> None:
        """End the renewal, and leave the lease to the process to which it was handed over."""
        self._has_ended = True
        self._wake.set()
        self._thread.join(_WAKE_S)
        if not self._thread.is_alive():
            self._held.close()

    def release(self) -> None:
        """End the lease. May be called repeatedly."""
        self.leave()
        remove(self._path)

    def abandon(self) -> None:
        """End the lease of a process that ends at once: another host can use the folder without a wait."""
        self._has_ended = True
        remove(self._path)

    def _age_s(self) -> float:
        return time.monotonic() - self._renewed_s

    def _renew_until_end(self) -> None:
        while True:
            self._wake.wait(HEARTBEAT_S)
            self._wake.clear()
            if self._has_ended:
                return
            began_s = time.monotonic()
            try:
                self._renew()
            except OSError as error:
                if self._age_s() > LATE_S:
                    self._warn(error.strerror or str(error))
            else:
                self._renewed_s, self._is_late = time.monotonic(), False
                if self._renewed_s - began_s > LATE_S:
                    self._warn(f"the disk took {self._renewed_s - began_s:.0f} s")
            self._renewed.set()

    def _renew(self) -> None:
        """Renew the lease and read the newest one. OSError as from the file system; a full disk does not cause one."""
        try:
            os.utime(str(self._path))  # without a time: the file system's clock, which the hosts share
        except OSError as error:
            if error.errno not in GONE:
                raise
            if self._held.is_elsewhere():
                self._lose(FolderLost(str(self.folder)))
                return
        newest = current(self.folder)
        if newest is None:  # removed by hand
            replace_file(self._path, self._holder.content())
        elif newest.owner not in ("", self.owner):
            self._lose(LeaseLost(str(self.folder), str(newest)))

    def _lose(self, lost: LeaseLost) -> None:
        if isinstance(lost, FolderLost) and self.on_folder_lost is not None:
            notify, self.on_folder_lost = self.on_folder_lost, lambda lost: None
            notify(lost)
            return
        if self._lost is not None:
            return
        self._lost = lost
        with self._lock:
            if self._interrupts:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)

    def _warn(self, cause: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._log(
                f"warning: cannot renew {self._path} ({cause}); another host can take over the run "
                f"{EXPIRES_AFTER_S:g} s after the last heartbeat"
            )


@contextlib.contextmanager
def _partial_file(folder: Path, holder: Holder) -> Iterator[Tuple[Path, float]]:
    """Write the file of a new lease under a temporary name; yield its path and its time in the file system's clock."""
    partial = folder / f".lease-{holder.owner}.partial"
    try:
        with new_file(partial) as file:
            file.write(holder.content())
        yield partial, partial.stat().st_mtime
    finally:
        remove(partial)


def _end_holders(live: List[LeaseFile], lease: Lease, log: Log) -> None:
    """Wait until the holders that `lease` has taken over have ended. Releases `lease` if one does not."""
    try:
        for each in live:
            log(f"taking over {each.path.parent} from {each}; waiting for it to end")
            _await_end(each, lease)
    except BaseException:
        lease.release()
        raise


def _await_end(file: LeaseFile, lease: Lease) -> None:
    """Wait until a holder has removed its lease, has died, or has had no heartbeat until the expiry.

    Raises:
        LeaseHeld: it does not end.
        LeaseLost: a third process has taken over.
    """
    deadline = time.monotonic() + _END_WITHIN_S
    changed_s, now = time.monotonic(), read(file.path)
    while now is not None and not (now.holder and now.holder.has_ended):
        if now.renewed_s != file.renewed_s:
            changed_s, file = time.monotonic(), now
        is_local = now.holder is not None and now.holder.is_local
        if not is_local and time.monotonic() - changed_s > now.expires_after_s:
            return
        if time.monotonic() > deadline:
            still = f"{now}, which has not ended within {_END_WITHIN_S:g} s after it was taken over"
            raise LeaseHeld(str(file.path.parent), still, "end that process, and repeat the command")
        lease.check()
        time.sleep(POLL_S)
        now = read(file.path)
