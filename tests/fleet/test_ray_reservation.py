"""Reservations of Ray nodes, also of several nodes with the same address."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List

import pytest
from bounded import COMMAND_S
from ray_cluster import ray_cluster

from raypod.errors import ClusterError, WaitTimedOut
from raypod.fleet.ray_reservation import Reservation, node_affinity, reserve
from raypod.plan.cluster import Cluster, Host
from raypod.plan.placement import Placement, Sizes, place

# Ray's own code leaves sockets and files to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
BOUND = (60.0, "run.start_timeout_s")
SOON = (1.0, "run.start_timeout_s")


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray, connected to three nodes with the same address and 4 IPUs each."""
    with ray_cluster(("", "", ""), resources={"IPU": 4}) as started:
        yield started.ray


@pytest.fixture
def nodes(ray: Any) -> List[Dict[str, Any]]:
    return sorted(ray.nodes(), key=lambda node: str(node["NodeID"]))


def placement_of(nodes: List[Dict[str, Any]], total_replicas: int) -> Placement:
    hosts = tuple(Host(f"host{number}", str(node["NodeManagerAddress"])) for number, node in enumerate(nodes))
    return place(Cluster("same", hosts), Sizes(total_replicas, len(hosts), 1), 1)


def nodes_of_actors(ray: Any, reservation: Reservation) -> List[str]:
    """The ids of the nodes that the actors of the hosts run on, in host order."""

    class Probe:
        def node_id(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

    actor_class = ray.remote(Probe)
    actors = [actor_class.options(**reservation.options(host, 1)).remote() for host in range(len(reservation.indexes))]
    found: List[str] = ray.get([actor.node_id.remote() for actor in actors], timeout=COMMAND_S)
    for actor in actors:
        ray.kill(actor)
    return found


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_instances_run_on_the_nodes_of_the_plan_in_its_order(
    ray: Any, nodes: List[Dict[str, Any]], order: List[int]
) -> None:
    chosen = [nodes[number] for number in order]
    reservation = reserve(ray, placement_of(chosen, 6), chosen, BOUND)
    try:
        assert list(reservation.node_ids) == [node["NodeID"] for node in chosen]
        assert nodes_of_actors(ray, reservation) == [node["NodeID"] for node in chosen]
    finally:
        ray.util.remove_placement_group(reservation.group)


def test_a_node_outside_the_plan_is_not_used(ray: Any, nodes: List[Dict[str, Any]]) -> None:
    for without in range(3):
        chosen = [node for number, node in enumerate(nodes) if number != without]
        try:
            reservation = reserve(ray, placement_of(chosen, 4), chosen, BOUND)
        except ClusterError as error:  # if this Ray cannot pin by node id
            assert "several Ray nodes have the address" in str(error)  # noqa: PT017 - the other outcome of the two
            continue
        try:
            assert nodes_of_actors(ray, reservation) == [node["NodeID"] for node in chosen]
        finally:
            ray.util.remove_placement_group(reservation.group)


def test_all_or_none_is_reserved(ray: Any, nodes: List[Dict[str, Any]]) -> None:
    class Guest:
        def is_here(self) -> bool:
            return True

    def take(node: Dict[str, Any]) -> Any:
        """All IPUs of a node."""
        guest = ray.remote(Guest).options(**node_affinity(node), resources={"IPU": 4}).remote()
        assert ray.get(guest.is_here.remote(), timeout=COMMAND_S)
        return guest

    guests = [take(nodes[1])]
    with pytest.raises(WaitTimedOut, match="resources, which other jobs may be using"):
        reserve(ray, placement_of(nodes, 12), nodes, SOON)
    guests += [take(nodes[0]), take(nodes[2])]  # the failed reservation holds nothing there
    for guest in guests:
        ray.kill(guest)
    assert all(group["state"] == "REMOVED" for group in ray.util.placement_group_table().values())


def test_a_node_that_is_gone_is_not_waited_for(ray: Any, nodes: List[Dict[str, Any]]) -> None:
    gone = {**nodes[0], "NodeID": "0" * 56, "Labels": {"ray.io/node-id": "0" * 56}}
    with pytest.raises(ClusterError, match=r"host0.*(has ended while it was being reserved|have the address)"):
        reserve(ray, placement_of([gone], 4), [gone], BOUND)
