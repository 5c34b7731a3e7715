"""From `ray up` to a trained model, on hosts that are network namespaces: one pod for all tests here, in this order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator

import pytest
from bounded import wait_until
from pod.emulated import REPOSITORY, EmulatedPod, address, why_not

HOSTS = 3  # and a fourth, the intruder, that no file lists
INTRUDER = 4
TRAINING = ["--num-instances", str(HOSTS), "--replicas", str(2 * HOSTS), "--device", "emulated"]
EPOCHS = ["--epochs", "5"]
NOTICED_WITHIN_S = 15.0

pytestmark = [pytest.mark.pod, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

CLUSTER = f"""
cluster_name: e2e
provider: {{type: local, head_ip: {address(1)}, worker_ips: [{address(2)}, {address(3)}]}}
auth: {{ssh_user: root, ssh_private_key: ~/.ssh/id_ed25519}}
file_mounts: {{"~/.ray/auth_token": "~/.ray/auth_token"}}
head_start_ray_commands:
  - ray stop
  - >-
    export RAY_enable_autoscaler_v2=0 AUTOSCALER_UPDATE_INTERVAL_S=1 AUTOSCALER_NODE_SSH_INTERVAL_S=1
    RAY_AUTH_MODE=token
    RAY_health_check_initial_delay_ms=1000 RAY_health_check_period_ms=1000 RAY_health_check_timeout_ms=1000
    RAY_health_check_failure_threshold=3 RAY_gcs_rpc_server_reconnect_timeout_s=8;
    ray start --head --port=6379 --node-ip-address={address(1)} --num-cpus=1 --object-store-memory=80000000
    --disable-usage-stats --include-dashboard=false --autoscaling-config=~/ray_bootstrap_config.yaml
worker_start_ray_commands:
  - ray stop
  - >-
    export RAY_AUTH_MODE=token RAY_gcs_rpc_server_reconnect_timeout_s=8;
    ray start --address=$RAY_HEAD_IP:6379 --num-cpus=1 --object-store-memory=80000000 --disable-usage-stats
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all hosts see."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def pod(shared: Path) -> Iterator[EmulatedPod]:
    """The pod, with a cluster of Ray that `ray up` has made on its first three hosts."""
    (shared / "cluster.yaml").write_text(CLUSTER)
    made = EmulatedPod(f"t{os.getpid()}", HOSTS + 1, shared)
    try:
        made.run("op", "bash", "-c", "umask 077; ray get-auth-token --generate >/dev/null")
        made.run("op", "ray", "up", "-y", "--no-config-cache", str(shared / "cluster.yaml"), within_s=120)
        yield made
    finally:
        made.down()
    assert f"t{os.getpid()}" not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


def train(shared: Path, name: str, *flags: str) -> str:
    """The command line of a run, for the head."""
    flags = ("--cluster", str(shared / "cluster.yaml"), "--run-dir", str(shared / name), "--wait-hosts", "90", *flags)
    return f"cd {REPOSITORY} && exec python -m raypod.train {' '.join((*TRAINING, *flags))}"


def summary(folder: Path) -> Dict[str, Any]:
    content: Dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


@pytest.fixture(scope="module")
def on_this_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run folder of the same training, under way on this one host."""
    folder = tmp_path_factory.mktemp("here")
    line = [sys.executable, "-m", "raypod.train", *TRAINING, *EPOCHS, "--run-dir", str(folder / "run")]
    with (folder / "out").open("wb") as out:
        command = subprocess.Popen(line, cwd=REPOSITORY, stdout=out, stderr=subprocess.STDOUT)
        yield folder / "run"
        command.terminate()
        command.wait(60)


def test_a_pod_trains_to_the_weights_of_one_host(pod: EmulatedPod, shared: Path, on_this_host: Path) -> None:
    command = pod.start(1, train(shared, "run", *EPOCHS), shared / "out")
    assert command.wait(200) == 0, (shared / "out").read_text()
    ours = summary(shared / "run")
    assert ours["test_accuracy"] >= 95
    hosts = [json.loads((shared / "run" / "plan.json").read_text())["instances"][k]["host"] for k in range(HOSTS)]
    assert hosts == [address(1), address(2), address(3)]
    assert wait_until((on_this_host / "summary.json").is_file, 120)
    assert ours["weights_sha256"] == summary(on_this_host)["weights_sha256"]
