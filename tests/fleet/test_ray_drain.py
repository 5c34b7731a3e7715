"""Hosts that Ray drains: their instances move to another host; without one the run ends with a checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest
from bounded import COMMAND_S
from ray_cluster import SECOND_HOST, ray_cluster

from raypod.checkpoint import resume
from raypod.coordinator import coordinator
from raypod.events import Event, Repaired, RunEnded, UpdateDone
from raypod.fleet.base import Fleet
from raypod.fleet.inline import InlineFleet
from raypod.fleet.ray import RayFleet
from raypod.plan.cluster import LOCAL, Cluster, Host
from raypod.plan.plan import Plan, make_plan
from raypod.plan.resolve import from_values
from raypod.record.metrics import MetricsAggregator
from raypod.tasks.registry import facts_of

# Ray's own code leaves sockets and files to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def pod() -> Iterator[Any]:
    """Ray, connected to a cluster of two hosts for one test only: Ray schedules nothing on drained hosts."""
    with ray_cluster() as started:
        yield started.ray


def drain(ray: Any, address: str) -> None:
    node = next(node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == address)
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test", "--node-id", node]
    command = [str(Path(sys.executable).parent / "ray"), "drain-node", *reason, "--deadline-remaining-seconds", "600"]
    command += ["--address", ray.get_runtime_context().gcs_address]
    subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_S)


def events_of(plan: Plan, fleet: Fleet, react: Callable[[Event], None] = lambda event: None) -> List[Event]:
    events = []
    for event in coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0)):
        events.append(event)
        react(event)
    return events


def only(events: List[Event], kind: type) -> Any:
    (found,) = (event for event in events if isinstance(event, kind))
    return found


def test_instances_leave_a_drained_host_and_without_another_one_the_run_ends(pod: Any, tmp_path: Path) -> None:
    addresses = [node["NodeManagerAddress"] for node in pod.nodes()]
    head = next(address for address in addresses if address != SECOND_HOST)
    cluster = Cluster("two", (Host(head, head), Host(SECOND_HOST, SECOND_HOST)))

    def plan_for(name: str, cluster: Cluster, updates: int, run: Dict[str, Any], instances: int) -> Plan:
        training = {"updates": updates, "epochs": 400, "lr_schedule": "constant"}
        run = {"device": "emulated", **run}
        config = from_values({"run": run, "training": training, "pod": {"num_instances": instances}})
        return make_plan(config, cluster, facts_of(config), str(tmp_path / name))

    def drain_hosts(event: Event) -> None:
        if isinstance(event, UpdateDone) and event.update == 3:
            drain(pod, SECOND_HOST)
        elif isinstance(event, Repaired):  # its instance has left the second host
            drain(pod, head)

    plan = plan_for("run", cluster, 2000, {}, 2)
    events = events_of(plan, RayFleet(plan), drain_hosts)
    moved = only(events, Repaired)
    assert (moved.lost, moved.hosts, moved.seeded_from) == ((1,), (head,), "instance 0")
    assert (moved.restarts, moved.generation) == (0, 2)
    ended = only(events, RunEnded)
    assert ended.interrupted
    assert ended.cause == f"Ray drains host {head}"
    assert [event.update for event in events if isinstance(event, UpdateDone)] == list(range(1, ended.updates + 1))
    good = resume.newest_valid(tmp_path / "run" / "checkpoints")[0]
    assert good is not None
    assert good.update == ended.updates
    whole = plan_for("whole", LOCAL, ended.updates, {"fleet": "inline"}, 1)
    assert only(events_of(whole, InlineFleet(whole)), RunEnded).weights_sha256 == ended.weights_sha256
