"""What depends on Ray itself: instances, how they fail, reservations, servers, and drained hosts, on one cluster."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

import psutil
import pytest

from raypod.errors import ClusterError, WaitTimedOut
from raypod.plan.cluster import LOCAL, Cluster, Host
from raypod.plan.placement import Placement, Sizes, place
from raypod.plan.plan import Plan, make_plan
from raypod.plan.resolve import from_values
from raypod.runtime.workers.fleet import FleetBroken
from raypod.runtime.workers.ray import RayFleet, serve_here, serve_on
from raypod.runtime.workers.ray_reservation import Reservation, node_affinity, reserve
from raypod.training.tasks.registry import facts_of
from tests.support.bounded import COMMAND_S, wait_until
from tests.support.ray_cluster import SECOND_HOST, THIRD_HOST, RayCluster, ray_cluster

# Ray's own code leaves sockets and files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def pod() -> Iterator[RayCluster]:
    """Nodes with 4 IPUs each on three hosts; the last two have the same address."""
    with ray_cluster(("", SECOND_HOST, THIRD_HOST, THIRD_HOST), resources={"IPU": 4}) as started:
        yield started


@pytest.fixture
def ray(pod: RayCluster) -> Any:
    return pod.ray


@pytest.fixture
def nodes(ray: Any) -> List[Dict[str, Any]]:
    remote = [node for node in ray.nodes() if node["NodeManagerAddress"] in (SECOND_HOST, THIRD_HOST)]
    return sorted(remote, key=lambda node: str(node["NodeID"]))


@pytest.fixture
def two_hosts(pod: RayCluster) -> Cluster:
    own = str(pod.nodes[0].node_ip_address)
    return Cluster("two", (Host(own, own), Host(SECOND_HOST, SECOND_HOST)), data_network="127.0.0.0/8")


def plan_for(folder: Path, cluster: Cluster = LOCAL, **sections: Dict[str, Any]) -> Plan:
    run = {"device": "emulated", "max_restarts": 0}
    pod = {"num_instances": 2, "threads_per_replica": 1}
    config = from_values({"run": run, "pod": pod, "training": {"updates": 60}, **sections})
    return make_plan(config, cluster, facts_of(config), str(folder / "run"))


def instance_processes() -> List[int]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "InstanceP" in process.name():  # the kernel keeps 15 characters of "ray::InstanceProcess"
                found.append(process.pid)
    return found


def nothing_is_left(ray: Any) -> bool:
    groups = ray.util.placement_group_table().values()
    return not instance_processes() and all(group["state"] == "REMOVED" for group in groups)


def test_instances_have_environment_network_and_heartbeats(ray: Any, two_hosts: Cluster, tmp_path: Path) -> None:
    fleet = RayFleet(plan_for(tmp_path, two_hosts))
    try:
        assert [each.host for each in fleet.start()] == [host.name for host in two_hosts.hosts]
        assert len(instance_processes()) == 2
        environments = ray.get([actor.environment.remote() for actor in fleet._actors])
        beats = ray.get([actor.beat.remote() for actor in fleet._actors])
        logs = [Path(fleet._plan.log_file(index)).read_text().splitlines() for index in range(2)]
        ray.get([actor.call.remote("leave") for actor in fleet._actors])
        later = ray.get([actor.beat.remote() for actor in fleet._actors])
    finally:
        fleet.close()
    assert [each["POPDIST_REPLICA_INDEX_OFFSET"] for each in environments] == ["0", "2"]
    for each in environments:
        assert each["OMP_NUM_THREADS"] == "1"
        assert each["GLOO_SOCKET_IFNAME"] == each["HOROVOD_GLOO_IFACE"] == "lo"
        assert each["EMULATED_POD_RENDEZVOUS"].startswith("127.")
    assert logs[1][0].startswith("instance 1 of 2, pid ")
    assert [each.log_line for each in beats] == [lines[-1] for lines in logs]
    assert [each.log_line for each in later] == [None, None]
    assert wait_until(lambda: nothing_is_left(ray))


def test_a_replacement_that_starts_while_another_instance_dies_is_known(ray: Any, tmp_path: Path) -> None:
    """Otherwise its pid, and the data that is compared with that of the others, are those of the lost one."""
    fleet = RayFleet(plan_for(tmp_path))
    try:
        for each in fleet.start():
            os.kill(each.pid, signal.SIGKILL)
        with pytest.raises(FleetBroken):
            fleet.repair((0,), may_share_hosts=True)
        fleet.repair((1,), may_share_hosts=True)
        assert sorted(each.pid for each in fleet.started()) == sorted(instance_processes())
    finally:
        fleet.close()


def placement_of(nodes: List[Dict[str, Any]], replicas: int) -> Placement:
    hosts = tuple(Host(f"host{number}", str(node["NodeManagerAddress"])) for number, node in enumerate(nodes))
    return place(Cluster("same", hosts), Sizes(replicas, len(hosts), 1), 1)


def nodes_of_actors(ray: Any, reservation: Reservation) -> List[str]:
    """Return the ids of the nodes that the actors of the hosts run on, in host order."""

    class Probe:
        def node_id(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

    options = [reservation.options(host, 1) for host in range(len(reservation.indexes))]
    actors = [ray.remote(Probe).options(**each).remote() for each in options]
    found: List[str] = ray.get([actor.node_id.remote() for actor in actors], timeout=COMMAND_S)
    for actor in actors:
        ray.kill(actor)
    return found


def take(ray: Any, node: Dict[str, Any]) -> Any:
    class Guest:
        def is_here(self) -> bool:
            return True

    guest = ray.remote(Guest).options(**node_affinity(node), resources={"IPU": 4}).remote()
    assert ray.get(guest.is_here.remote(), timeout=COMMAND_S)
    return guest


def test_all_nodes_of_a_plan_are_reserved_in_its_order_or_none(ray: Any, nodes: List[Dict[str, Any]]) -> None:
    bound = (60.0, "run.start_timeout_s")
    for order in ((0, 1, 2), (2, 0, 1), (1, 2), (0, 2), (0, 1)):
        chosen = [nodes[number] for number in order]
        try:
            reservation = reserve(ray, placement_of(chosen, 2 * len(chosen)), chosen, bound)
        except ClusterError as error:  # if this Ray cannot pin by node id
            assert "several Ray nodes have the address" in str(error)  # noqa: PT017 - the other outcome of the two
            assert len(order) == 2
            continue
        try:
            assert list(reservation.node_ids) == [node["NodeID"] for node in chosen]
            assert nodes_of_actors(ray, reservation) == [node["NodeID"] for node in chosen]
        finally:
            reservation.release(ray)

    guests = [take(ray, nodes[1])]
    with pytest.raises(WaitTimedOut, match=r"waited 1 s for Ray to reserve resources, which other jobs may.*host1: "):
        reserve(ray, placement_of(nodes, 12), nodes, (1.0, "run.start_timeout_s"))
    guests += [take(ray, nodes[0]), take(ray, nodes[2])]  # the failed reservation holds nothing there
    for guest in guests:
        ray.kill(guest)
    gone = {**nodes[0], "NodeID": "0" * 56, "Labels": {"ray.io/node-id": "0" * 56}}
    with pytest.raises(ClusterError, match=r"host0.*(has ended while it was being reserved|have the address)"):
        reserve(ray, placement_of([gone], 4), [gone], bound)
    assert all(group["state"] == "REMOVED" for group in ray.util.placement_group_table().values())


def disk_class() -> type:
    """Return a local class: Ray cannot import test modules in its workers, and copies the class instead."""

    class Disk:
        def __init__(self, name: str) -> None:
            self._content = name.encode()

        def append(self, data: bytes) -> int:
            self._content += data
            return len(self._content)

        def fill(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def hang(self) -> None:
            time.sleep(600)

        def die(self) -> None:
            os._exit(1)

    return Disk


def test_an_instance_uses_an_object_on_another_host_that_starts_again(ray: Any, two_hosts: Cluster) -> None:
    server = serve_here(ray, disk_class(), "ab")
    use = ray.remote(lambda copy: [copy.result(copy.request("append", bytes(3 << 20)), 60) for _ in range(2)])
    assert ray.get(use.remote(server), timeout=COMMAND_S) == [2 + (3 << 20), 2 + 2 * (3 << 20)]
    with pytest.raises(OSError, match="No space left") as caught:
        server.result(server.request("fill"), 60)
    assert caught.value.errno == errno.ENOSPC

    def append() -> Any:
        with contextlib.suppress(ConnectionError):
            return server.result(server.request("append", b"c"), 60)

    with pytest.raises(ConnectionError, match="^no connection to the coordinator's host: .*$"):
        server.result(server.request("die"), 60)
    assert wait_until(lambda: append() == 3)  # empty
    hanging = server.request("hang")
    with pytest.raises(TimeoutError, match="the coordinator's host does not respond"):
        server.result(hanging, 0.1)
    server.close()
    with pytest.raises(ConnectionError):
        server.result(hanging, 60)
    other = serve_on(ray, two_hosts, SECOND_HOST, disk_class(), "ab")
    assert other.result(other.request("append", b"c"), 60) == 3
    for _ in range(2):
        with pytest.raises(ConnectionError, match=f"^no connection to host {SECOND_HOST}: "):
            other.result(other.request("die"), 60)
