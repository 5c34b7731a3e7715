"""Hosts without a shared disk: the checkpoints are on the coordinator's disk, wherever instance 0 is."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, Iterator, List

import psutil
import pytest
from bounded import wait_until
from harness import Outcome, assert_undisturbed, pid_of, plan_for, run
from ray_cluster import SECOND_HOST, THIRD_HOST, RayCluster, ray_cluster

from raypod.checkpoint.resume import find_checkpoint, newest_valid
from raypod.checkpoint.storage import checkpoint_path, checkpoints_folder
from raypod.coordinator import coordinator
from raypod.events import Event, Repaired, RunEnded, UpdateDone
from raypod.fleet.ray import RayFleet
from raypod.plan.cluster import Cluster, Host
from raypod.plan.plan import Plan
from raypod.record.metrics import MetricsAggregator

HAS_OLD_RAY = tuple(int(part) for part in version("ray").split(".")[:2]) < (2, 50)
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class OtherHost:
    """A Ray node on this machine with a disk of its own in place of the folder `run_dir`."""

    def __init__(self, cluster: RayCluster, address: str, run_dir: Path) -> None:
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={cluster.cluster.address}"]
        start += [f"--node-ip-address={address}", "--num-cpus=1", "--object-store-memory=80000000", "--block"]
        mount = 'mount -t tmpfs tmpfs "$0" && exec "$@"'
        unshare = ["unshare", "--mount", "--propagation", "private", "--fork", "--kill-child"]
        self.address, self._run_dir = address, run_dir
        command = [*unshare, "sh", "-c", mount, str(run_dir), *start]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        joined = wait_until(lambda: address in (each["NodeManagerAddress"] for each in cluster.ray.nodes()), 60)
        assert joined, "the node has not joined"

    @property
    def run_dir(self) -> Path:
        """The folder on the disk of this host."""
        return Path(f"/proc/{self._process.pid}/root{self._run_dir}")

    def lose(self) -> None:
        """End all processes of the host at once."""
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(self._process.pid)
            for process in [started, *started.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait(10)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder. Skips if file systems cannot be mounted in a namespace."""
    folder = tmp_path / "run"
    folder.mkdir()
    test = ["unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "tmpfs", str(folder)]
    if not shutil.which("unshare") or subprocess.run(test, capture_output=True, check=False, timeout=10).returncode:
        pytest.skip("mount namespaces are not permitted here")
    return folder


@pytest.fixture
def hosts(run_dir: Path) -> Iterator[List[Any]]:
    """The coordinator's host, and two others that do not share its disk."""
    with ray_cluster(("",)) as cluster, contextlib.ExitStack() as stack:
        others = []
        for address in (SECOND_HOST, THIRD_HOST):
            others.append(OtherHost(cluster, address, run_dir))
            stack.callback(others[-1].lose)
        yield [cluster.nodes[0].node_ip_address, *others]


def kill_instance_0(host: OtherHost) -> None:
    log = (host.run_dir / "logs" / "instance-0.log").read_text()
    os.kill(int(log.rpartition(", pid ")[2].partition(":")[0]), signal.SIGKILL)


def plan_on(folder: Path, updates: int, *addresses: str, **keys: Any) -> Plan:
    cluster = Cluster("apart", tuple(Host(address, address) for address in addresses))
    training = {"updates": updates, "lr_schedule": "constant"}
    return plan_for(
        folder, cluster, pod={"num_instances": 2}, training=training, run={"checkpoint_every": "8 updates", **keys}
    )


@pytest.mark.skipif(
    HAS_OLD_RAY, reason="Ray 2.10 is often too slow to start work on the spare host before it is given up"
)
def test_checkpoints_are_sent_to_the_disk_of_the_coordinator(hosts: List[Any], run_dir: Path, tmp_path: Path) -> None:
    head, second, third = hosts
    plan = plan_on(tmp_path, 80, SECOND_HOST, head, THIRD_HOST)
    assert [host.name for host in plan.placement.hosts] == [SECOND_HOST, head]
    outcome = run(plan, [(10, lambda plan: kill_instance_0(second)), (30, lambda plan: second.lose())])
    assert [repair.hosts for repair in outcome.repairs] == [(SECOND_HOST,), (THIRD_HOST,)]
    assert [repair.instances[repair.lost[0]].host for repair in outcome.repairs] == [SECOND_HOST, THIRD_HOST]
    folder = checkpoints_folder(run_dir)
    valid, damaged = newest_valid(folder)
    assert valid is not None
    assert (valid.update, valid.manifest.weights_sha256, damaged) == (80, outcome.sha256, [])
    assert (third.run_dir / "logs").is_dir()
    assert not checkpoints_folder(third.run_dir).exists()
    assert_undisturbed(plan, outcome, undisturbed(tmp_path, 80))


def test_checkpoints_are_loaded_from_the_disk_of_the_coordinator(
    hosts: List[Any], run_dir: Path, tmp_path: Path
) -> None:
    """On a resume, and on a rollback after all instances were lost."""
    head, second, _ = hosts
    run(plan_on(tmp_path, 20, SECOND_HOST, head))
    plan = plan_on(tmp_path, 60, SECOND_HOST, head, resume=str(run_dir))
    found = find_checkpoint(plan).checkpoint
    assert found.update == 20
    events: List[Event] = []
    for event in coordinator.run(plan, RayFleet(plan), MetricsAggregator(plan, 0.0), found):
        events.append(event)
        if isinstance(event, UpdateDone) and event.update == 44:
            kill_instance_0(second)
            os.kill(pid_of(plan, 1), signal.SIGKILL)
    assert [event.update for event in events if isinstance(event, UpdateDone)] == list(range(21, 61))
    (repaired,) = (event for event in events if isinstance(event, Repaired))
    assert repaired.seeded_from == str(checkpoint_path(checkpoints_folder(run_dir), 40))
    assert isinstance(events[-1], RunEnded)
    assert events[-1].weights_sha256 == undisturbed(tmp_path, 60).sha256


def undisturbed(folder: Path, updates: int) -> Outcome:
    """Run the same training on this host, without faults."""
    (folder / "inline").mkdir()
    training = {"updates": updates, "lr_schedule": "constant"}
    plan = plan_for(folder / "inline", run={"fleet": "inline"}, pod={"num_instances": 1}, training=training)
    return run(plan)
