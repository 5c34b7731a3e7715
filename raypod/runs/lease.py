"""Hold the lease of a folder: acquire it, renew it in a thread, take it over, hand it over, release it.

At most one process at a time holds it, among all hosts that share the folder's disk. See `lease_file` for the rules.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Callable, Iterator, List, Optional, Tuple

from raypod.errors import FolderLost, LeaseHeld, LeaseLost
from raypod.runs import lease_file
from raypod.runs.lease_file import EXPIRES_AFTER_S, GONE, POLL_S, Holder, LeaseFile, Log
from raypod.system.files import HeldFolder, new_file, replace_file

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
    me = lease_file.this_process()
    for _ in range(_ATTEMPTS):
        before = lease_file.find(folder)
        with _partial_file(folder, me) as (partial, now_s):
            live: List[LeaseFile] = []
            for each in reversed(before):
                if not lease_file.has_ended(each, now_s, log):
                    if not take_over:
                        raise lease_file.held(each, now_s, hint)
                    live.append(each)
            path = folder / f"lease-{1 + (before[-1].number if before else 0)}.json"
            if not lease_file.publish(partial, path, me):
                continue
        considered = {me.owner, *(each.owner for each in before)}
        if any(each.owner not in considered for each in lease_file.find(folder)):
            lease_file.remove(path)  # another process has acquired it at the same time: examine the folder again
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
        found = lease_file.current(folder)
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
        return lease_file.number_of(self._path.name) == 1

    def remove_ended(self) -> None:
        """Remove the leases before this one, which have ended, and what killed processes have left of theirs."""
        for each in lease_file.find(self.folder):
            if each.number < lease_file.number_of(self._path.name):
                lease_file.remove(each.path)
        own = lease_file.read(self._path)
        for path in lease_file.abandoned(self.folder, own.renewed_s) if own is not None else ():
            lease_file.remove(path)

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
        lease_file.remove(self._path)

    def abandon(self) -> None:
        """End the lease of a process that ends at once: another host can use the folder without a wait."""
        self._has_ended = True
        with contextlib.suppress(OSError):  # of the disk
            lease_file.remove(self._path)

    def _age_s(self) -> float:
        return time.monotonic() - self._renewed_s

    def _renew_until_end(self) -> None:
        while True:
            self._wake.wait(lease_file.HEARTBEAT_S)
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
        newest = lease_file.current(self.folder)
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
        lease_file.remove(partial)


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
    changed_s, now = time.monotonic(), lease_file.read(file.path)
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
        now = lease_file.read(file.path)
