"""Who gets into a cluster, and how it is ended: a real head, started as the cluster files start it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Iterator, Tuple

import pytest
from bounded import wait_until

from raypod.errors import ClusterError
from raypod.fleet import gcs, ray_admission
from raypod.pod import stop_cluster

TOKEN = "ab" * 32
NAME = f"test-cluster-access-{os.getpid()}"  # what bears it is ended: another run of these tests has its own
HAS_TOKENS = ray_admission.has_tokens(ray_admission.ray_version())


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Not pytest's own: Ray's sockets lie in it, and their paths may have 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="r") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def head(folder: Path) -> Iterator[str]:
    """The address of a head that is closed by a token, where Ray can do that."""
    token = folder / "token"
    token.write_text(TOKEN)
    environment = {**os.environ, stop_cluster.MARK: NAME, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    environment.update(RAY_TMPDIR=str(folder), RAY_enable_autoscaler_v2="0")
    words = ["start", "--head", "--port=0", "--node-ip-address=127.0.0.1", "--num-cpus=1", "--include-dashboard=false"]
    words += ["--object-store-memory=80000000", "--disable-usage-stats", "--dashboard-agent-listen-port=0"]
    command = [sys.executable, "-m", "ray.scripts.scripts", *words]
    started = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        yield (folder / "ray" / "ray_current_cluster").read_text().strip()
    finally:
        assert stop_cluster.stop(NAME)["left"] == 0
    assert not stop_cluster.members(NAME)


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user without a token."""
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))


@pytest.fixture
def quick() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 10, "Ray's own answer comes after 20 s"


@pytest.mark.skipif(not HAS_TOKENS, reason="Ray before 2.52 has no tokens")
@pytest.mark.usefixtures("quick")
def test_without_a_token_or_with_a_wrong_one_nobody_gets_in(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gcs.check(head).state == gcs.REFUSED
    with pytest.raises(ClusterError, match=f"{head} is closed by a token, and here is none: .*/token is not there"):
        ray_admission.admission(head)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "cd" * 32)
    with pytest.raises(ClusterError, match=f"{head} refuses the token of RAY_AUTH_TOKEN"):
        ray_admission.admission(head)


def test_who_has_the_token_is_told_what_runs_there(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    assert ray_admission.admission(head) == {"RAY_AUTH_MODE": "token" if HAS_TOKENS else "disabled"}
    assert gcs.check(head, TOKEN).state == gcs.ANSWERED
    assert gcs.alive_addresses(head, TOKEN) == [head.rpartition(":")[0]]
    if HAS_TOKENS:
        assert gcs.check(head, TOKEN).told == ray_admission.ray_version()


def test_another_ray_is_told_at_once(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setattr(ray_admission, "ray_version", lambda: "1.0.0")
    with pytest.raises(ClusterError, match=r"runs Ray 2\..*, and here is 1\.0\.0; both must be equal"):
        ray_admission.admission(head)


def test_a_machine_that_is_no_host_of_the_cluster_is_told_so(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setattr(gcs, "alive_addresses", lambda *_: ["10.9.9.9"])
    with pytest.raises(ClusterError, match=r"is no host of the Ray cluster at .*; run this on one of 10\.9\.9\.9"):
        ray_admission.admission(head)


def test_hosts_that_do_not_come_are_named(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    hosts = [head.rpartition(":")[0], "10.9.9.9"]
    assert gcs.wait_for_hosts(head, 0, hosts) == {"missing": ["10.9.9.9"], "told": ""}


def test_only_what_is_marked_is_ended() -> None:
    def start(mark: str) -> Tuple[subprocess.Popen[bytes], int]:
        """A process with a mark, and its child, which has none."""
        program = "env -i sleep 60 & echo $!; wait; exec sleep 60"  # it is ended itself, and not by its child's end
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


def test_a_cluster_that_ends_while_it_is_joined_is_not_waited_for() -> None:
    program = """
import time
from raypod.fleet import ray_session
with ray_session._given_up_after(0.5, "h:1"):
    time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("raypod: error: the Ray cluster at h:1 has not let this process in for 0.5 s")
