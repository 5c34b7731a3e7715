"""Token authentication, with a real head that is started like in the cluster files."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Iterator

import pytest

from raypod.errors import ClusterError
from raypod.pod import stop_cluster
from raypod.runtime.workers import gcs, ray_admission
from tests.support.bounded import COMMAND_S

TOKEN = "ab" * 32
NAME = f"test-cluster-access-{os.getpid()}"  # unique, because all processes with this mark are ended
HAS_TOKENS = ray_admission.has_tokens(ray_admission.ray_version())


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a head that requires a token, if this Ray supports it. This user has none."""
    # A folder with a short name: the paths of Ray's sockets in it are limited to 107 bytes.
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        token = Path(folder, "token")
        token.write_text(TOKEN)
        environment = {**os.environ, stop_cluster.MARK: NAME, "RAY_AUTH_MODE": "token", "RAY_TMPDIR": folder}
        environment.update(RAY_AUTH_TOKEN_PATH=str(token), RAY_enable_autoscaler_v2="0")
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0", "--num-cpus=1"]
        command += ["--node-ip-address=127.0.0.1", "--include-dashboard=false", "--object-store-memory=80000000"]
        command += ["--disable-usage-stats", "--dashboard-agent-listen-port=0"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        try:
            assert done.returncode == 0, done.stdout + done.stderr
            monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
            monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", f"{folder}/none")
            yield Path(folder, "ray", "ray_current_cluster").read_text().strip()
        finally:
            assert stop_cluster.stop(NAME)["left"] == 0
        assert not stop_cluster.members(NAME)


def test_a_cluster_admits_hosts_with_its_token_and_version(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if HAS_TOKENS:  # since Ray 2.52
        assert gcs.check(head).state == gcs.REFUSED
        with pytest.raises(ClusterError, match=f"{head} requires a token, and this host has none: .*/none does not"):
            ray_admission.join_environment(head)
        monkeypatch.setenv("RAY_AUTH_TOKEN", "cd" * 32)
        with pytest.raises(ClusterError, match=f"{head} rejects the token of RAY_AUTH_TOKEN"):
            ray_admission.join_environment(head)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    assert ray_admission.join_environment(head) == {"RAY_AUTH_MODE": "token" if HAS_TOKENS else "disabled"}
    answer, own = gcs.check(head, TOKEN), head.rpartition(":")[0]
    assert (answer.state, answer.detail) == (gcs.ANSWERED, ray_admission.ray_version() if HAS_TOKENS else answer.detail)
    assert gcs.alive_addresses(head, TOKEN) == [own]
    assert gcs.wait_for_hosts(head, 0, [own, "10.9.9.9"]) == {"missing": ["10.9.9.9"], "error": ""}
    with monkeypatch.context() as patched:
        patched.setattr(ray_admission, "ray_version", lambda: "1.0.0")
        with pytest.raises(ClusterError, match=r"runs Ray 2\..*, and this host has 1\.0\.0; both must be equal"):
            ray_admission.join_environment(head)
    monkeypatch.setattr(gcs, "alive_addresses", lambda *_: ["10.9.9.9"])
    with pytest.raises(ClusterError, match=r"is not a host of the Ray cluster at .*; run this on one of 10\.9\.9\.9"):
        ray_admission.join_environment(head)
