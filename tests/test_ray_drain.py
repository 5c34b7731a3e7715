"""A host that is to be taken away: the run ends after the calls under way, with a checkpoint."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator, List

import pytest

from raypod import coordinator
from raypod.checkpoint import reader
from raypod.cluster import Cluster, Host
from raypod.config import from_values
from raypod.datasets import dataset_size
from raypod.events import RunEnded, UpdateDone
from raypod.fleet.ray import RayFleet
from raypod.metrics import MetricsFold
from raypod.plan import make_plan

# Ray's own code leaves sockets and files to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SECOND_HOST = "127.0.0.2"


@pytest.fixture
def pod() -> Iterator[Any]:
    """A Ray cluster of two hosts on this machine, of its own: a host that was drained takes no more work."""
    environment = dict(os.environ)
    ray = importlib.import_module("ray")
    cluster = importlib.import_module("ray.cluster_utils").Cluster()
    sizes = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
    cluster.add_node(**sizes)
    cluster.add_node(**sizes, node_ip_address=SECOND_HOST)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", namespace="tests")
    try:
        yield ray
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(environment)


def drain(ray: Any, address: str) -> None:
    node = next(node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == address)
    told = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test", "--node-id", node]
    command = [str(Path(sys.executable).parent / "ray"), "drain-node", *told, "--deadline-remaining-seconds", "600"]
    command += ["--address", ray.get_runtime_context().gcs_address]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def test_a_host_that_ray_drains_ends_the_run_with_a_checkpoint(pod: Any, tmp_path: Path) -> None:
    addresses = [node["NodeManagerAddress"] for node in pod.nodes()]
    head = next(address for address in addresses if address != SECOND_HOST)
    cluster = Cluster("two", (Host(head, head), Host(SECOND_HOST, SECOND_HOST)))
    values = {"run": {"device": "emulated"}, "training": {"epochs": 400, "lr_schedule": "constant"}}
    config = from_values({**values, "pod": {"num_instances": 2}})
    plan = make_plan(config, cluster, dataset_size(config), str(tmp_path / "run"))
    ended: List[RunEnded] = []
    for event in coordinator.run(plan, RayFleet(plan), MetricsFold(plan, 0.0)):
        if isinstance(event, UpdateDone) and event.update == 3:
            drain(pod, SECOND_HOST)
        if isinstance(event, RunEnded):
            ended.append(event)
    assert ended[0].interrupted
    assert ended[0].cause == f"Ray drains host {SECOND_HOST}"
    good = reader.newest_good(tmp_path / "run" / "checkpoints")[0]
    assert good is not None
    assert good.update == ended[0].updates
