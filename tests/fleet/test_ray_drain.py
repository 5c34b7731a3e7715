"""Hosts that are to be taken away: instances move while they can; else the run ends, with a checkpoint."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest

from raypod.checkpoint import resume
from raypod.coordinator import coordinator
from raypod.datasets import dataset_size
from raypod.events import Event, Repaired, RunEnded, UpdateDone
from raypod.fleet.base import Fleet
from raypod.fleet.inline import InlineFleet
from raypod.fleet.ray import RayFleet
from raypod.plan.cluster import LOCAL, Cluster, Host
from raypod.plan.plan import Plan, make_plan
from raypod.plan.resolve import from_values
from raypod.record.metrics import MetricsFold

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
    head = cluster.add_node(**sizes)
    cluster.add_node(**sizes, node_ip_address=SECOND_HOST)
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    # Ray may take the last node's address for this process's own.
    ray.init(address=cluster.address, namespace="tests", _node_ip_address=head.node_ip_address, **quiet)
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


def events_of(plan: Plan, fleet: Fleet, react: Callable[[Event], None] = lambda event: None) -> List[Event]:
    events = []
    for event in coordinator.run(plan, fleet, MetricsFold(plan, 0.0)):
        events.append(event)
        react(event)
    return events


def only(events: List[Event], kind: type) -> Any:
    (found,) = (event for event in events if isinstance(event, kind))
    return found


def test_instances_leave_a_host_that_ray_drains_and_without_another_one_the_run_ends(pod: Any, tmp_path: Path) -> None:
    addresses = [node["NodeManagerAddress"] for node in pod.nodes()]
    head = next(address for address in addresses if address != SECOND_HOST)
    cluster = Cluster("two", (Host(head, head), Host(SECOND_HOST, SECOND_HOST)))

    def plan_for(name: str, cluster: Cluster, updates: int, run: Dict[str, Any], instances: int) -> Plan:
        training = {"updates": updates, "epochs": 400, "lr_schedule": "constant"}
        run = {"device": "emulated", **run}
        config = from_values({"run": run, "training": training, "pod": {"num_instances": instances}})
        return make_plan(config, cluster, dataset_size(config), str(tmp_path / name))

    def take_away(event: Event) -> None:
        if isinstance(event, UpdateDone) and event.update == 3:
            drain(pod, SECOND_HOST)
        elif isinstance(event, Repaired):  # its instance has moved
            drain(pod, head)

    plan = plan_for("run", cluster, 2000, {}, 2)
    events = events_of(plan, RayFleet(plan), take_away)
    moved = only(events, Repaired)
    assert (moved.lost, moved.hosts, moved.seeded_from) == ((1,), (head,), "instance 0")
    assert (moved.restarts, moved.generation) == (0, 2)
    ended = only(events, RunEnded)
    assert ended.interrupted
    assert ended.cause == f"Ray drains host {head}"
    assert [event.update for event in events if isinstance(event, UpdateDone)] == list(range(1, ended.updates + 1))
    good = resume.newest_good(tmp_path / "run" / "checkpoints")[0]
    assert good is not None
    assert good.update == ended.updates
    whole = plan_for("whole", LOCAL, ended.updates, {"fleet": "inline"}, 1)
    assert only(events_of(whole, InlineFleet(whole)), RunEnded).weights_sha256 == ended.weights_sha256
