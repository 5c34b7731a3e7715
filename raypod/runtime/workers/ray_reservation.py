"""Reservations of Ray nodes (one placement group, all or none), and the room for replicas on the live ones.

In a placement group, as that of a Ray Tune trial, its bundles are used instead: they are reserved already.

Where Ray supports label selectors, a bundle is pinned to the id of its node. Older versions (2.10) pin only by
`node:<address>`, a resource of every node with that address; there the node of each bundle is looked up afterwards.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import time
from typing import Any, Callable, Dict, List, Sequence, Tuple

from raypod.errors import ClusterError, WaitTimedOut
from raypod.plan.cluster import Host
from raypod.plan.elastic import Room
from raypod.plan.placement import Placement
from raypod.plan.plan import Plan
from raypod.runtime.workers.ray_nodes import alive_nodes, draining_nodes, nodes_of
from raypod.system.command_line import counted

_NODE_ID_LABEL = "ray.io/node-id"  # Ray sets it on every node


@dataclasses.dataclass(frozen=True)
class Reservation:
    """A placement group, and for each host, in order: the id of its Ray node, and the index and size of its bundle.

    `is_own` is False for the placement group in which this process itself runs.
    """

    group: Any
    node_ids: Tuple[str, ...]
    indexes: Tuple[int, ...]
    bundles: List[Dict[str, float]]
    is_own: bool = True

    def release(self, ray: Any) -> None:
        """End the reservation, unless another one has made it."""
        if self.is_own:
            ray.util.remove_placement_group(self.group)

    def options(self, host_index: int, share: int) -> Dict[str, Any]:
        """Return the options of an actor that takes one of `share` equal parts of a host's bundle."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        bundle = self.bundles[host_index]
        options: Dict[str, Any] = {
            "num_cpus": bundle.get("CPU", 0) / share,
            "max_restarts": 0,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(self.group, self.indexes[host_index]),
        }
        if "IPU" in bundle:
            options["resources"] = {"IPU": bundle["IPU"] / share}
        return options


def node_affinity(node: Dict[str, Any]) -> Dict[str, Any]:
    """Return the options of a task or actor on a node, outside of any reservation."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    return {"num_cpus": 0, "scheduling_strategy": strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)}


def has_succeeded(ray: Any, ref: Any) -> bool:
    """Return whether a task or a call of an actor has ended without an error."""
    try:
        ray.get(ref)
    except ray.exceptions.RayError:
        return False
    return True


def reserve(ray: Any, placement: Placement, nodes: List[Dict[str, Any]], bound: Tuple[float, str]) -> Reservation:
    """Reserve one bundle on each of `nodes`, all or none. `bound` is a timeout in seconds and the setting it is from.

    If this process runs in a placement group, nothing more is reserved.

    Raises:
        WaitTimedOut: other jobs use the resources.
        ClusterError: a node has ended, or cannot be distinguished from another one with the same address.
    """
    enclosing = ray.util.get_current_placement_group()
    if enclosing is not None:
        return _within(ray, enclosing, placement, nodes)
    timeout_s, setting = bound
    counts = [len(placement.instances_on(index)) for index in range(len(nodes))]
    own_node, own_cpus = ray.get_runtime_context().get_node_id(), _own_cpus(ray)
    bundles = [
        _bundle_for(node, count, placement.ipus_on(index), own_cpus if node["NodeID"] == own_node else 0.0)
        for index, (node, count) in enumerate(zip(nodes, counts))
    ]
    strategy = "STRICT_SPREAD" if len(bundles) > 1 else "PACK"
    group = ray.util.placement_group(bundles, strategy=strategy, **_label_selector(ray, nodes))
    try:
        deadline = time.monotonic() + timeout_s
        while not group.wait(min(1.0, timeout_s)):  # short waits, so that Ctrl-C is handled
            _check_alive(ray, placement, nodes)
            if time.monotonic() >= deadline:
                requested = "; ".join(f"{host.name}: {bundle}" for host, bundle in zip(placement.hosts, bundles))
                what = f"Ray to reserve resources, which other jobs may be using ({requested})"
                raise WaitTimedOut(what, timeout_s, setting)
        indexes = _bundle_indexes(ray, group, placement, nodes, bundles)
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
    return Reservation(group, tuple(node["NodeID"] for node in nodes), indexes, bundles)


def _within(ray: Any, group: Any, placement: Placement, nodes: Sequence[Dict[str, Any]]) -> Reservation:
    """Return the bundles of an existing group for the hosts; actors share the CPUs of a bundle, and request only IPUs.

    The first bundle is that of the process which the group was made for, and used only where there is no other one.
    """
    bundle_nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    indexes, bundles = [], []
    for host_index, (host, node) in enumerate(zip(placement.hosts, nodes)):
        on_node = [index for index, node_id in bundle_nodes.items() if node_id == node["NodeID"]]
        needed = placement.ipus_on(host_index) if "IPU" in node["Resources"] else 0
        fitting = [index for index in on_node if group.bundle_specs[index].get("IPU", 0) >= needed]
        if not fitting:
            what = f"{counted(needed, 'IPU')} on host {host.name}" if needed else f"a bundle on host {host.name}"
            raise ClusterError(
                f"this process runs in a placement group of Ray without {what}, and the run uses only resources of "
                "that group: add them to it"
            )
        indexes.append(max(fitting))
        bundles.append({"IPU": float(needed)} if needed else {})
    return Reservation(group, tuple(node["NodeID"] for node in nodes), tuple(indexes), bundles, is_own=False)


def _own_cpus(ray: Any) -> float:
    """Return the CPUs that Ray has assigned to this process; 0 for a driver."""
    worker = ray._private.worker
    if worker.global_worker.mode != worker.WORKER_MODE:
        return 0.0
    return float(ray.get_runtime_context().get_assigned_resources().get("CPU", 0.0))


def _label_selector(ray: Any, nodes: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
    """Return the argument that pins each bundle to its node; {} if this Ray has no label selectors."""
    can_select = "bundle_label_selector" in inspect.signature(ray.util.placement_group).parameters
    if not can_select or any(node.get("Labels", {}).get(_NODE_ID_LABEL) != node["NodeID"] for node in nodes):
        return {}
    return {"bundle_label_selector": [{_NODE_ID_LABEL: node["NodeID"]} for node in nodes]}


def _check_alive(ray: Any, placement: Placement, nodes: Sequence[Dict[str, Any]]) -> None:
    """Raise ClusterError if a node has ended: the wait for a bundle that is pinned to it would not end."""
    alive = {node["NodeID"] for node in alive_nodes(ray)}
    gone = [host.name for host, node in zip(placement.hosts, nodes) if node["NodeID"] not in alive]
    if gone:
        raise ClusterError(f"the Ray node of {', '.join(gone)} has ended while it was being reserved; start again")


def _bundle_indexes(
    ray: Any, group: Any, placement: Placement, nodes: Sequence[Dict[str, Any]], bundles: Sequence[Dict[str, float]]
) -> Tuple[int, ...]:
    """Return the bundle on the node of each host: its own, or an equal one of a host with the same address."""
    bundle_nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    found = []
    for host, node, bundle in zip(placement.hosts, nodes, bundles):
        on_node = [
            index for index, other in enumerate(bundles) if bundle_nodes[index] == node["NodeID"] and other == bundle
        ]
        if not on_node:
            raise ClusterError(
                f"{host.name}: several Ray nodes have the address {node['NodeManagerAddress']}, and this version of "
                "Ray cannot distinguish them; run one node per address"
            )
        found.append(on_node[0])
    return tuple(found)


def _bundle_for(node: Dict[str, Any], instances: int, ipus: int, used_cpus: float) -> Dict[str, float]:
    """Return the bundle of a host: a share of its cores (fractional, so that 4 instances fit on 2 cores), and IPUs.

    The task that starts the run, in this process, uses `used_cpus` of the cores until its end.
    """
    resources = node["Resources"]
    bundle = {f"node:{node['NodeManagerAddress']}": 0.001}
    share = min(1.0, int(100 * max(0.0, resources.get("CPU", 0) - used_cpus) / instances) / 100)
    if share:
        bundle["CPU"] = share * instances
    if ipus and "IPU" in resources:
        bundle["IPU"] = float(ipus)
    return bundle


_RESPONSE_S = 10.0  # for a process to start on a responsive host; Ray needs a minute to mark a silent one dead
_POLL_INTERVAL_S, _LOG_INTERVAL_S = 1.0, 10.0


class HostRoom:
    """The room on the hosts of a plan's cluster."""

    def __init__(self, ray: Any, full: Plan, log: Callable[[str], None]) -> None:
        """`full` is the plan of the run with all hosts; `log` receives lines while hosts are awaited."""
        self._ray, self._full, self._log = ray, full, log

    def alive(self) -> List[Room]:
        """Return the hosts whose nodes Ray considers alive, and does not drain."""
        return [Room(host.name, self._replicas_on(node)) for host, node in self._nodes()]

    def responsive(self) -> List[Room]:
        """Return those of them that start a process within a time."""
        probe = self._ray.remote(_respond)
        probes: Dict[Any, Room] = {}
        for host, node in self._nodes():
            task = probe.options(**node_affinity(node), max_retries=0).remote()
            probes[task] = Room(host.name, self._replicas_on(node))
        if not probes:
            return []
        ready, late = self._ray.wait(list(probes), num_returns=len(probes), timeout=_RESPONSE_S)
        for task in late:
            self._ray.cancel(task, force=True)
        return [room for task, room in probes.items() if task in ready and has_succeeded(self._ray, task)]

    def wait(self, is_enough: Callable[[List[Room]], bool], stop_requested: Callable[[], bool]) -> List[Room]:
        """Return the hosts that respond; see `ElasticFleet.wait_for_room`."""
        deadline, logged_s = time.monotonic() + self._full.config.pod.wait_hosts, -_LOG_INTERVAL_S
        while True:
            room, now_s = self.responsive(), time.monotonic()
            if now_s >= deadline or is_enough(room) or stop_requested():
                return room
            if now_s - logged_s > _LOG_INTERVAL_S:
                logged_s, there = now_s, {each.host for each in room}
                missing = [host.name for host in self._full.placement.hosts if host.name not in there]
                self._log(f"waiting for {', '.join(missing)} ({deadline - now_s:.0f} s more, --wait-hosts)")
            time.sleep(_POLL_INTERVAL_S)

    def _nodes(self) -> List[Tuple[Host, Dict[str, Any]]]:
        """Return the hosts of the cluster with their nodes, each node once."""
        hosts, draining = self._full.placement.cluster.hosts, draining_nodes()
        found: Dict[str, Tuple[Host, Dict[str, Any]]] = {}
        for host, node in zip(hosts, nodes_of(self._ray, hosts)):
            if node and node["NodeID"] not in draining:
                found.setdefault(node["NodeID"], (host, node))
        return list(found.values())

    def _replicas_on(self, node: Dict[str, Any]) -> int:
        """Return the replicas for which a node has IPUs. On a pod without IPUs: those that the plan puts on a host."""
        geometry, hosts = self._full.geometry, len(self._full.placement.hosts)
        has_ipus = any(each["Resources"].get("IPU") for each in alive_nodes(self._ray))
        if not has_ipus:
            return geometry.total_replicas // hosts
        return int(node["Resources"].get("IPU", 0)) // geometry.ipus_per_replica


def _respond() -> None:
    """Do nothing: the process has started."""
