"""`raypod down` ends the processes with the mark of their cluster, and those that have lost it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Tuple

import pytest

from raypod.pod import stop_cluster
from tests.support.bounded import wait_until

pytestmark = pytest.mark.usefixtures("processes")


def test_only_marked_processes_and_their_children_are_ended() -> None:
    def start(mark: str) -> Tuple[subprocess.Popen[bytes], int]:
        """Start a process with a mark, and a child of it without one."""
        program = "env -i sleep 60 & echo $!; wait; exec sleep 60"  # so that the parent does not end with its child
        process = subprocess.Popen(["sh", "-c", program], env={**os.environ, stop_cluster.MARK: mark}, stdout=-1)
        assert process.stdout is not None
        return process, int(process.stdout.readline())

    (ours, child), (other, other_child) = start("pod-a"), start("pod-ab")
    try:
        assert stop_cluster.members("pod-a") == {ours.pid, child}
        assert stop_cluster.stop("pod-a") == {"found": 2, "left": 0, "others": stop_cluster.stop("none")["others"]}
        assert ours.wait(10) != 0
        assert stop_cluster.members("pod-ab") == {other.pid, other_child}
    finally:
        stop_cluster.stop("pod-ab")
        for process in (ours, other):
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()
    assert wait_until(lambda: not stop_cluster.members("pod-ab"))


def test_a_cluster_of_another_user_with_the_same_name_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, stop_cluster.MARK: "pod-c"}
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        try:
            assert wait_until(lambda: stop_cluster.members("pod-c") == {process.pid})
            monkeypatch.setattr(stop_cluster.os, "getuid", lambda: os.geteuid() + 1)  # root reads every environment
            assert stop_cluster.members("pod-c") == set()
        finally:
            process.kill()


def test_agents_of_a_dead_raylet_are_ended() -> None:
    """They have lost the mark and the marked parent, but are in the session of a marked process, like log_monitor."""
    agent = "(env -i bash -c 'exec -a ray::Agent sleep 60' & echo $!)"
    program, environment = f"{agent}; exec sleep 60", {**os.environ, stop_cluster.MARK: "pod-orphan"}
    ours = subprocess.Popen(["sh", "-c", program], env=environment, stdout=-1, start_new_session=True)
    other = subprocess.Popen(["sh", "-c", f"{agent}; exec sleep 60"], stdout=-1, start_new_session=True)
    assert ours.stdout is not None
    assert other.stdout is not None
    try:
        orphan, not_ours = int(ours.stdout.readline()), int(other.stdout.readline())
        assert wait_until(lambda: Path(f"/proc/{not_ours}/cmdline").read_bytes().startswith(b"ray::"))
        assert wait_until(lambda: stop_cluster.members("pod-orphan") == {ours.pid, orphan})
        assert stop_cluster.stop("pod-orphan")["left"] == 0
        assert not stop_cluster.members("pod-orphan")
        assert Path(f"/proc/{not_ours}").exists()
    finally:
        stop_cluster.stop("pod-orphan")
        os.kill(not_ours, signal.SIGKILL)
        other.kill()
        for process in (ours, other):
            process.wait(10)
            process.stdout.close()  # type: ignore[union-attr]


def test_workers_that_a_template_of_another_cluster_has_forked_are_not_ended(tmp_path: Path) -> None:
    """They have no raylet above them, and can be in the session of a marked process, as from one terminal."""
    (tmp_path / "worker_template.py").write_text("bash -c 'exec -a ray::Worker sleep 60' & echo $!; wait")
    program = f"(env -i PATH=$PATH bash {tmp_path}/worker_template.py &); exec sleep 60"
    environment = {**os.environ, stop_cluster.MARK: "pod-first"}
    ours = subprocess.Popen(["sh", "-c", program], env=environment, stdout=-1, start_new_session=True)
    assert ours.stdout is not None
    worker = int(ours.stdout.readline())
    try:
        assert wait_until(lambda: Path(f"/proc/{worker}/cmdline").read_bytes().startswith(b"ray::"))
        assert stop_cluster.members("pod-first") == {ours.pid}
    finally:
        stop_cluster.stop("pod-first")
        os.kill(worker, signal.SIGKILL)  # its template ends with it
        ours.wait(10)
        ours.stdout.close()
