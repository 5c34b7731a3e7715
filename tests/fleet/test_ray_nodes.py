"""Which Ray node an instance lives on, where several have the same address: that of the plan, by its id."""

from __future__ import annotations

import importlib
import os
from typing import Any, Dict, Iterator, List

import pytest

from raypod.errors import ClusterError, WaitTimedOut
from raypod.fleet.ray_nodes import Reservation, affinity_options, reserve
from raypod.plan.cluster import Cluster, Host
from raypod.plan.placement import Placement, place

# Ray's own code leaves sockets and files to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
BOUND = (60.0, "run.start_timeout_s")
SOON = (1.0, "run.start_timeout_s")


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray, connected to three nodes of one address, each with 4 IPUs."""
    environment = dict(os.environ)
    module = importlib.import_module("ray")
    cluster = importlib.import_module("ray.cluster_utils").Cluster()
    for _ in range(3):
        cluster.add_node(num_cpus=1, resources={"IPU": 4}, object_store_memory=80_000_000, include_dashboard=False)
    module.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", namespace="tests")
    yield module
    module.shutdown()
    cluster.shutdown()
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def nodes(ray: Any) -> List[Dict[str, Any]]:
    return sorted(ray.nodes(), key=lambda node: str(node["NodeID"]))


def placement_of(nodes: List[Dict[str, Any]], total_replicas: int) -> Placement:
    hosts = tuple(Host(f"host{number}", str(node["NodeManagerAddress"])) for number, node in enumerate(nodes))
    return place(Cluster("same", hosts), total_replicas, len(hosts), 1, 1)


def homes(ray: Any, reservation: Reservation) -> List[str]:
    """The node ids on which the actors of all hosts find themselves, in host order."""

    class Home:
        def node_id(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

    actor_class = ray.remote(Home)
    actors = [actor_class.options(**reservation.options(host, 1)).remote() for host in range(len(reservation.indexes))]
    found: List[str] = ray.get([actor.node_id.remote() for actor in actors], timeout=60)
    for actor in actors:
        ray.kill(actor)
    return found


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_instances_live_on_the_nodes_of_the_plan_in_its_order(
    ray: Any, nodes: List[Dict[str, Any]], order: List[int]
) -> None:
    chosen = [nodes[number] for number in order]
    reservation = reserve(ray, placement_of(chosen, 6), chosen, BOUND)
    try:
        assert list(reservation.node_ids) == [node["NodeID"] for node in chosen]
        assert homes(ray, reservation) == [node["NodeID"] for node in chosen]
    finally:
        ray.util.remove_placement_group(reservation.group)


def test_a_node_that_is_not_of_the_plan_is_not_taken(ray: Any, nodes: List[Dict[str, Any]]) -> None:
    for without in range(3):
        chosen = [node for number, node in enumerate(nodes) if number != without]
        try:
            reservation = reserve(ray, placement_of(chosen, 4), chosen, BOUND)
        except ClusterError as error:  # where Ray cannot pin by node id
            assert "several Ray nodes have the address" in str(error)  # noqa: PT017 - the other outcome of the two
            continue
        try:
            assert homes(ray, reservation) == [node["NodeID"] for node in chosen]
        finally:
            ray.util.remove_placement_group(reservation.group)


def test_all_or_none_is_reserved(ray: Any, nodes: List[Dict[str, Any]]) -> None:
    class Guest:
        def is_here(self) -> bool:
            return True

    def take(node: Dict[str, Any]) -> Any:
        """All IPUs of a node."""
        guest = ray.remote(Guest).options(**affinity_options(node, 4)).remote()
        assert ray.get(guest.is_here.remote(), timeout=60)
        return guest

    guests = [take(nodes[1])]
    with pytest.raises(WaitTimedOut, match="what others may be using"):
        reserve(ray, placement_of(nodes, 12), nodes, SOON)
    guests += [take(nodes[0]), take(nodes[2])]  # of which nothing is held
    for guest in guests:
        ray.kill(guest)
    assert all(group["state"] == "REMOVED" for group in ray.util.placement_group_table().values())


def test_a_node_that_is_gone_is_not_waited_for(ray: Any, nodes: List[Dict[str, Any]]) -> None:
    gone = {**nodes[0], "NodeID": "0" * 56, "Labels": {"ray.io/node-id": "0" * 56}}
    with pytest.raises(ClusterError, match=r"host0.*(has ended while it was to be reserved|have the address)"):
        reserve(ray, placement_of([gone], 4), [gone], BOUND)
