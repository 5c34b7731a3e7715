"""The reaper of a local Ray session finds the live processes of the Unix sessions of its input, and no others."""

from __future__ import annotations

import subprocess
from typing import Iterator

import psutil
import pytest

from raypod.runtime.workers import ray_reaper
from raypod.runtime.workers.ray_processes import RayProcesses
from tests.support.bounded import wait_until


@pytest.fixture
def leader(processes: None) -> Iterator[subprocess.Popen[bytes]]:
    """A process that leads a session with one child, and prints a line when both run."""
    script = "sleep 300 & echo; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        ray_reaper.kill({process.pid: ray_reaper.process_of(process.pid)})


def test_the_processes_of_a_session_also_without_their_leader(leader: subprocess.Popen[bytes]) -> None:
    (child,) = psutil.Process(leader.pid).children()
    leaders = {leader.pid: ray_reaper.process_of(leader.pid)}
    assert sorted(ray_reaper.members(leaders)) == sorted([leader.pid, child.pid])
    leader.kill()
    assert wait_until(lambda: ray_reaper.members(leaders) == [child.pid])  # the leader is a zombie
    leader.wait()
    assert ray_reaper.members(leaders) == [child.pid]
    ray_reaper.kill(leaders)
    assert ray_reaper.members(leaders) == []


def test_a_reused_pid_is_another_session(leader: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    before = ray_reaper.process_of(leader.pid)
    assert before is not None
    monkeypatch.setattr(before, "is_running", lambda: False)  # the pid exists, and is another process
    assert ray_reaper.members({leader.pid: before}) == []


def test_a_leader_that_ended_before_it_was_told(leader: subprocess.Popen[bytes]) -> None:
    ended = subprocess.Popen(["true"], start_new_session=True)
    ended.wait()
    assert ray_reaper.process_of(ended.pid) is None
    assert ray_reaper.members({ended.pid: None}) == []
    assert ray_reaper.members({leader.pid: None}) == []  # its pid belongs to another process by now


def test_the_end_of_a_session_waits_for_the_reaper(processes: None) -> None:
    session = RayProcesses(has_template=False)
    session.close()
    assert session._reaper.returncode == 0
