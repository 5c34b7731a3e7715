"""Leases of processes on one host, and on several hosts, which the tests simulate by the host's name."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest

from raypod.errors import FolderLost, LeaseHeld, LeaseLost
from raypod.runs import lease
from raypod.runs.lease import Lease
from tests.support.bounded import wait_until

Acquire = Callable[..., Lease]
OnHost = Callable[[str], None]


@pytest.fixture(autouse=True)
def frequent_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.2)


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> OnHost:
    """`on_host("far")`: from now on this process appears to be on another host."""
    return lambda name: monkeypatch.setattr(socket, "gethostname", lambda: name)


@pytest.fixture
def acquire(tmp_path: Path) -> Iterator[Acquire]:
    """`acquire(take_over=...)`: as `lease.acquire`, for one folder; the leases are released after the test."""
    held: List[Lease] = []

    def acquire_and_release(take_over: bool = False, log: Callable[[str], None] = print) -> Lease:
        held.append(lease.acquire(tmp_path, "the way out", take_over, log))
        return held[-1]

    yield acquire_and_release
    for each in held:
        each.release()


def entries(folder: Path) -> List[str]:
    return [path.name for path in folder.iterdir()]


def age(folder: Path, seconds: float) -> None:
    """Change the time of the last heartbeat."""
    found = lease.current(folder)
    assert found is not None
    os.utime(str(found.path), (found.renewed_s - seconds,) * 2)


def test_one_of_many_processes_acquires_a_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(20) as pool:
        attempts = [pool.submit(lease.acquire, tmp_path) for _ in range(20)]
    held = [each.result() for each in attempts if each.exception() is None]
    errors = {str(each.exception()) for each in attempts if each.exception() is not None}
    assert len(held) == len(errors) == 1
    assert f"is in use by pid {os.getpid()} on host {socket.gethostname()}" in errors.pop()
    assert len(entries(tmp_path)) == 1
    held[0].release()
    assert not entries(tmp_path)


def test_the_lease_of_a_dead_process_on_this_host_ends_at_once(
    processes: None, tmp_path: Path, acquire: Acquire
) -> None:
    program = (
        f"import os; from pathlib import Path; from raypod.runs import lease; lease.acquire(Path({str(tmp_path)!r}))"
    )
    subprocess.run([sys.executable, "-c", f"{program}; os._exit(9)"], check=False, timeout=60)
    assert len(entries(tmp_path)) == 1
    waits: List[str] = []
    held = acquire(log=waits.append)
    assert not held.is_first
    assert not waits
    held.remove_ended()
    assert len(entries(tmp_path)) == 1


def test_what_killed_processes_have_left_of_their_leases_is_removed(tmp_path: Path, acquire: Acquire) -> None:
    me = lease.this_process()
    dead = dataclasses.replace(me, owner="dead", started_ticks=me.started_ticks - 1)
    remote = dataclasses.replace(me, owner="remote", host="far")
    contents = {"dead": dead.content(), "live": me.content(), "remote": remote.content(), "empty": b"", "old": b""}
    for name, content in contents.items():
        (tmp_path / f".lease-{name}.partial").write_bytes(content)
    long_ago_s = time.time() - 3600
    os.utime(str(tmp_path / ".lease-old.partial"), (long_ago_s, long_ago_s))
    held = acquire()
    held.remove_ended()
    left = {".lease-live.partial", ".lease-remote.partial", ".lease-empty.partial"}
    assert set(entries(tmp_path)) == {*left, "lease-1.json"}


def test_a_live_holder_on_another_host_is_named(tmp_path: Path, acquire: Acquire, on_host: OnHost) -> None:
    on_host("far")
    acquire()
    on_host("near")
    with pytest.raises(LeaseHeld) as error:
        acquire()
    text = str(error.value)
    assert f"pid {os.getpid()} on host far (since " in text
    assert "expires after 30 s" in text
    assert text.endswith("the way out")


def test_the_lease_of_a_dead_host_expires_and_a_command_that_changes_nothing_leaves_it(
    tmp_path: Path, acquire: Acquire, on_host: OnHost
) -> None:
    on_host("far")
    acquire().leave()  # no heartbeat any more
    on_host("near")
    age(tmp_path, 29)
    with pytest.raises(LeaseHeld):
        acquire()
    age(tmp_path, 2)
    waits: List[str] = []
    before = entries(tmp_path)
    acquire(log=waits.append).release()
    assert "s for a heartbeat of pid " in waits[0]
    assert entries(tmp_path) == before
    acquire()
    with pytest.raises(LeaseHeld, match="on host near"):
        acquire()


def test_a_live_host_whose_clock_is_late_keeps_its_lease(
    tmp_path: Path, acquire: Acquire, on_host: OnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host("far")
    held, real = acquire(), os.utime
    monkeypatch.setattr(os, "utime", lambda path: real(path, (time.time() - 3600,) * 2))
    assert wait_until(lambda: lease.find(tmp_path)[0].renewed_s < time.time() - 3000)
    on_host("near")
    with pytest.raises(LeaseHeld):
        acquire()
    held.check()


@pytest.mark.parametrize("host", ["far", ""])
def test_a_holder_that_is_taken_over_ends(tmp_path: Path, acquire: Acquire, on_host: OnHost, host: str) -> None:
    here = socket.gethostname()
    on_host(host or here)
    held = acquire()
    on_host(here)
    with ThreadPoolExecutor(1) as pool:
        new = pool.submit(acquire, take_over=True)
        assert wait_until(lambda: len(lease.find(tmp_path)) == 2)
        with pytest.raises(LeaseLost, match=f"pid {os.getpid()} on host {here}"):
            wait_until(lambda: held.check() is not None)
        assert not new.done()  # it waits until the old holder has ended
        held.release()
        new.result(timeout=30).check()
    assert len(entries(tmp_path)) == 1


def test_a_lost_lease_interrupts_a_wait_of_the_main_thread(acquire: Acquire) -> None:
    held = acquire()
    began = threading.Event()

    def wait() -> None:
        with held.interrupting():
            began.set()
            threading.Event().wait(30)

    with ThreadPoolExecutor(1) as pool:
        new = pool.submit(lambda: began.wait(30) and acquire(take_over=True))
        with pytest.raises(LeaseLost):
            wait()
        held.release()
        new.result(timeout=30)


def test_a_process_that_was_stopped_notices_the_loss_before_it_goes_on(
    acquire: Acquire, on_host: OnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_S", 600)  # the thread renews the lease only when `check` wakes it
    on_host("far")
    held = acquire()
    on_host("near")
    age(held.folder, 31)
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.1)
    acquire()
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 60)
    with pytest.raises(LeaseLost):
        held.check()


def test_a_disk_that_fails_is_reported_once_and_does_not_end_the_run(
    acquire: Acquire, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: List[str] = []
    attempts: List[int] = []
    held, real = acquire(log=warnings.append), os.utime

    def fail(*arguments: Any) -> None:
        attempts.append(1)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "utime", fail)
    monkeypatch.setattr(lease, "LATE_S", 0.1)
    assert wait_until(lambda: len(attempts) > 5)
    held.check()
    assert len(warnings) == 1
    assert "Input/output error" in warnings[0]
    monkeypatch.setattr(os, "utime", real)
    held.check()


def test_a_full_disk_does_not_prevent_heartbeats(
    processes: None, small_disk: Callable[..., Path], tmp_path: Path
) -> None:
    folder = small_disk(tmp_path / "disk", 64)
    warnings: List[str] = []
    held = lease.acquire(folder, log=warnings.append)
    try:
        with pytest.raises(OSError, match="No space"):
            (folder / "full").write_bytes(bytes(1 << 20))
        first = lease.find(folder)[0].renewed_s
        assert wait_until(lambda: lease.find(folder)[0].renewed_s > first)
        assert not warnings
    finally:
        held.release()


@pytest.mark.parametrize("is_below", [True, False])
def test_nothing_is_written_where_the_folder_was(tmp_path: Path, is_below: bool) -> None:
    """As after `umount -l`: the path leads to the folder below the mount point, or to none."""
    folder = tmp_path / "run"
    folder.mkdir()
    held = lease.acquire(folder)
    try:
        held.check_folder()
        folder.rename(tmp_path / "unmounted")
        if is_below:
            folder.mkdir()
        with pytest.raises(FolderLost, match="its disk was unmounted"):
            held.check_folder()
        with pytest.raises(FolderLost):
            wait_until(lambda: held.check() is not None)
    finally:
        held.release()
    assert is_below is folder.exists()
    assert not is_below or not entries(folder)


def test_a_lease_that_was_removed_by_hand_is_written_again(tmp_path: Path, acquire: Acquire) -> None:
    held = acquire()
    (path,) = tmp_path.iterdir()
    path.unlink()
    held.check_folder()
    assert wait_until(path.exists)
    held.check()
