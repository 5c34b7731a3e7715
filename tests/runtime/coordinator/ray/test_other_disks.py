"""Hosts without a shared disk: the checkpoints are on the coordinator's disk, wherever instance 0 is."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator

import psutil
import pytest

from raypod.plan.cluster import Cluster, Host
from raypod.plan.plan import Plan
from raypod.training.checkpoint.resume import newest_valid
from raypod.training.checkpoint.storage import checkpoints_folder
from tests.support.bounded import wait_until
from tests.support.faulty_runs import pid_of, plan_for, run
from tests.support.ray_cluster import SECOND_HOST, RayCluster, ray_cluster

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
NAMESPACE = ["unshare", "--mount", "--propagation", "private", "--fork", "--kill-child"]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder. Skips if file systems cannot be mounted in a namespace."""
    folder = tmp_path / "run"
    folder.mkdir()
    test = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", str(folder)]
    if not shutil.which("unshare") or subprocess.run(test, capture_output=True, check=False, timeout=10).returncode:
        pytest.skip("mount namespaces are not permitted here")
    return folder


@contextlib.contextmanager
def other_host(cluster: RayCluster, run_dir: Path) -> Iterator[Path]:
    """A Ray node on this machine with a disk of its own in place of `run_dir`; the context is the folder on it."""
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={cluster.cluster.address}"]
    start += [f"--node-ip-address={SECOND_HOST}", "--num-cpus=1", "--object-store-memory=80000000", "--block"]
    command = [*NAMESPACE, "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"', str(run_dir), *start]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        nodes = lambda: [each["NodeManagerAddress"] for each in cluster.ray.nodes()]  # noqa: E731
        assert wait_until(lambda: SECOND_HOST in nodes()), "the node has not joined"
        yield Path(f"/proc/{process.pid}/root{run_dir}")
    finally:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait(10)


def test_checkpoints_are_sent_to_the_disk_of_the_coordinator_and_loaded_from_it(run_dir: Path, tmp_path: Path) -> None:
    """Also on a rollback after all instances were lost."""

    def plan_of(updates: int, cluster: Cluster, **run_section: Any) -> Plan:
        training = {"updates": updates, "lr_schedule": "constant"}
        run_section = {"checkpoint_every": "8 updates", **run_section}
        return plan_for(tmp_path, cluster, pod={"num_instances": 2}, training=training, run=run_section)

    checkpoints = checkpoints_folder(run_dir)
    with ray_cluster(("",)) as started, other_host(started, run_dir) as there:
        addresses = (SECOND_HOST, str(started.nodes[0].node_ip_address))
        cluster = Cluster("apart", tuple(Host(each, each) for each in addresses))
        part = run(plan_of(20, cluster))
        valid, damaged = newest_valid(checkpoints)
        assert (valid.update, valid.manifest.weights_sha256, damaged) == (20, part.sha256, [])

        def kill_all(plan: Plan) -> None:
            log = (there / "logs" / "instance-0.log").read_text()
            os.kill(int(log.rpartition(", pid ")[2].partition(":")[0]), signal.SIGKILL)
            os.kill(pid_of(plan, 1), signal.SIGKILL)

        outcome = run(plan_of(60, cluster, resume=str(run_dir)), [(44, kill_all)])
        assert not checkpoints_folder(there).exists()
    assert outcome.updates == list(range(21, 61))
    assert [Path(repair.seeded_from) for repair in outcome.repairs] == [checkpoints / "update-00000040"]
    shutil.rmtree(str(run_dir))
    training = {"updates": 60, "lr_schedule": "constant"}
    whole = run(plan_for(tmp_path, run={"fleet": "inline"}, pod={"num_instances": 1}, training=training))
    assert whole.sha256 == outcome.sha256
