"""Token authentication and the end of a cluster, with a real head that is started like in the cluster files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Iterator, Tuple

import pytest
from bounded import COMMAND_S, wait_until

from raypod.errors import ClusterError
from raypod.fleet import gcs, ray_admission
from raypod.pod import stop_cluster

TOKEN = "ab" * 32
NAME = f"test-cluster-access-{os.getpid()}"  # unique, because all processes with this mark are ended
HAS_TOKENS = ray_admission.has_tokens(ray_admission.ray_version())


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with a short name: the paths of Ray's sockets in it are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="r") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def head(folder: Path) -> Iterator[str]:
    """The address of a head that requires a token, if this Ray supports it."""
    token = folder / "token"
    token.write_text(TOKEN)
    environment = {**os.environ, stop_cluster.MARK: NAME, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    environment.update(RAY_TMPDIR=str(folder), RAY_enable_autoscaler_v2="0")
    arguments = [
        "start",
        "--head",
        "--port=0",
        "--node-ip-address=127.0.0.1",
        "--num-cpus=1",
        "--include-dashboard=false",
    ]
    arguments += ["--object-store-memory=80000000", "--disable-usage-stats", "--dashboard-agent-listen-port=0"]
    command = [sys.executable, "-m", "ray.scripts.scripts", *arguments]
    started = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        yield (folder / "ray" / "ray_current_cluster").read_text().strip()
    finally:
        assert stop_cluster.stop(NAME)["left"] == 0
    assert not stop_cluster.members(NAME)


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run as a user without a token."""
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))


@pytest.fixture
def quick() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 10, "Ray's own client reports it after 20 s"


@pytest.mark.skipif(not HAS_TOKENS, reason="Ray before 2.52 has no tokens")
@pytest.mark.usefixtures("quick")
def test_a_missing_and_a_wrong_token_are_rejected(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gcs.check(head).state == gcs.REFUSED
    with pytest.raises(ClusterError, match=f"{head} requires a token, and this host has none: .*/token does not exist"):
        ray_admission.join_environment(head)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "cd" * 32)
    with pytest.raises(ClusterError, match=f"{head} rejects the token of RAY_AUTH_TOKEN"):
        ray_admission.join_environment(head)


def test_the_right_token_is_accepted(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    assert ray_admission.join_environment(head) == {"RAY_AUTH_MODE": "token" if HAS_TOKENS else "disabled"}
    assert gcs.check(head, TOKEN).state == gcs.ANSWERED
    assert gcs.alive_addresses(head, TOKEN) == [head.rpartition(":")[0]]
    if HAS_TOKENS:
        assert gcs.check(head, TOKEN).detail == ray_admission.ray_version()


def test_another_version_of_ray_is_reported_at_once(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setattr(ray_admission, "ray_version", lambda: "1.0.0")
    with pytest.raises(ClusterError, match=r"runs Ray 2\..*, and this host has 1\.0\.0; both must be equal"):
        ray_admission.join_environment(head)


def test_a_machine_outside_the_cluster_is_rejected(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setattr(gcs, "alive_addresses", lambda *_: ["10.9.9.9"])
    with pytest.raises(ClusterError, match=r"is not a host of the Ray cluster at .*; run this on one of 10\.9\.9\.9"):
        ray_admission.join_environment(head)


def test_hosts_that_do_not_join_are_named(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    hosts = [head.rpartition(":")[0], "10.9.9.9"]
    assert gcs.wait_for_hosts(head, 0, hosts) == {"missing": ["10.9.9.9"], "error": ""}


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


def test_a_join_that_hangs_exits_after_the_timeout() -> None:
    program = """
import time
from raypod.fleet import ray_session
with ray_session._exit_after(0.5, "h:1"):
    time.sleep(60)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("raypod: error: cannot join the Ray cluster at h:1 within 0.5 s")
