"""Ray nodes of a placement: match nodes to hosts, wait for missing ones, reserve them, find drained ones.

A reservation is one placement group with a bundle per host, all or none. Where Ray supports label selectors, a bundle
is pinned to the id of its node. Older versions (2.10) pin only by `node:<address>`, a resource of every node with that
address; there the node of each bundle is looked up afterwards.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import logging
import time
from typing import Any, Callable, Dict, List, Sequence, Set, Tuple

from raypod.errors import ClusterError, WaitTimedOut
from raypod.plan.cluster import LOCAL, Host
from raypod.plan.placement import Placement

_POLL_INTERVAL_S = 0.5
_LOG_INTERVAL_S = 10.0
_NODE_ID_LABEL = "ray.io/node-id"  # Ray sets it on every node


# ---- matching nodes to hosts ----------------------------------------------------------------------------------------


def wait_for_nodes(
    ray: Any, placement: Placement, timeout_s: float, log: Callable[[str], None]
) -> List[Dict[str, Any]]:
    """Return the Ray node of every host of a placement, in order, once all are alive.

    `log` receives a line every 10 s while hosts are missing.

    Raises:
        ClusterError: hosts are still missing after `timeout_s` seconds, or have fewer IPUs than the plan needs.
    """
    deadline, logged_s = time.monotonic() + timeout_s, -_LOG_INTERVAL_S
    while missing_hosts(ray, placement) and time.monotonic() < deadline:
        if time.monotonic() - logged_s > _LOG_INTERVAL_S:
            logged_s, left_s = time.monotonic(), deadline - time.monotonic()
            log(f"waiting for {', '.join(missing_hosts(ray, placement))} ({left_s:.0f} s more, --wait-hosts)")
        time.sleep(min(_POLL_INTERVAL_S, max(0.0, deadline - time.monotonic())))
    return match_hosts(ray, placement)


def missing_hosts(ray: Any, placement: Placement) -> List[str]:
    """Return the hosts of a placement without a live Ray node."""
    return [host.name for host, node in zip(placement.hosts, _nodes_of(ray, placement)) if not node]


def match_hosts(ray: Any, placement: Placement) -> List[Dict[str, Any]]:
    """Return the Ray node of every host of a placement, in order.

    Raises:
        ClusterError: hosts are missing, or have fewer IPUs than the plan needs.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    missing = missing_hosts(ray, placement)
    if missing:
        raise ClusterError(
            f"{placement.cluster.name}: no Ray node is alive on {', '.join(missing)}; "
            f"alive: {', '.join(node['NodeManagerAddress'] for node in alive)}"
        )
    nodes = _nodes_of(ray, placement)
    total = sum(each["Resources"].get("IPU", 0) for each in alive)
    for index, (host, node) in enumerate(zip(placement.hosts, nodes)):
        needed, available = placement.ipus_on(index), node["Resources"].get("IPU", 0)
        if total and needed > available:  # the hosts of an emulated pod have no IPU resource
            raise ClusterError(
                f"host {host.name} has {available:g} IPUs and the plan puts {needed} on it (the pod has {total:g} in "
                f"all, the plan needs {placement.sizes.total_ipus}); use fewer replicas or more hosts"
            )
    return nodes


def host_name(placement: Placement, node: Dict[str, Any]) -> str:
    """Return the name of a Ray node in the cluster file; its address if it is not in the file."""
    if placement.cluster is LOCAL:
        return placement.hosts[0].name
    names = [host.name for host in placement.cluster.hosts if _is_on(host, node)]
    return names[0] if names else str(node["NodeManagerAddress"])


def is_in_cluster(placement: Placement, node: Dict[str, Any]) -> bool:
    """Return whether a Ray node is a host of the placement's cluster."""
    return any(_is_on(host, node) for host in placement.cluster.hosts)


def _nodes_of(ray: Any, placement: Placement) -> List[Dict[str, Any]]:
    """Return the live node of each host; {} for none."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    if placement.cluster is LOCAL:
        own = ray.get_runtime_context().get_node_id()
        return [node for node in alive if node["NodeID"] == own]
    return [next((node for node in alive if _is_on(host, node)), {}) for host in placement.hosts]


def _is_on(host: Host, node: Dict[str, Any]) -> bool:
    return host.address in (node["NodeManagerAddress"], node["NodeManagerHostname"], node.get("NodeName"))


# ---- draining -------------------------------------------------------------------------------------------------------


def draining_hosts(placement: Placement, nodes: List[Dict[str, Any]]) -> List[str]:
    """Return the names of the hosts among `nodes` that Ray is draining (`ray drain-node`, or a cloud preemption)."""
    draining = draining_nodes()
    names = {host_name(placement, node): None for node in nodes if node["NodeID"] in draining}
    return list(names)


def draining_nodes() -> Set[str]:
    """Return the ids of the nodes that Ray is draining. Ray schedules nothing on them.

    Ray has no public API for this. With a Ray version without the private one, no node is considered draining.
    """
    try:
        get_draining_nodes = importlib.import_module("ray._private.state").state.get_draining_nodes
    except (ImportError, AttributeError) as error:
        _log_missing_api(str(error))
        return set()
    return set(get_draining_nodes())


@functools.lru_cache(maxsize=None)
def _log_missing_api(cause: str) -> None:
    """Log once that draining hosts cannot be detected."""
    logging.getLogger(__name__).warning("this version of Ray does not report draining hosts: %s", cause)


# ---- reserving ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Reservation:
    """A placement group, and for each host, in order: the id of its Ray node, and the index and size of its bundle."""

    group: Any
    node_ids: Tuple[str, ...]
    indexes: Tuple[int, ...]
    bundles: List[Dict[str, float]]

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


def reserve(ray: Any, placement: Placement, nodes: List[Dict[str, Any]], bound: Tuple[float, str]) -> Reservation:
    """Reserve one bundle on each of `nodes`, all or none. `bound` is a timeout in seconds and the setting it is from.

    Raises:
        WaitTimedOut: other jobs use the resources.
        ClusterError: a node has ended, or cannot be distinguished from another one with the same address.
    """
    timeout_s, setting = bound
    counts = [len(placement.instances_on(index)) for index in range(len(nodes))]
    bundles = [
        _bundle_for(node, count, placement.ipus_on(index)) for index, (node, count) in enumerate(zip(nodes, counts))
    ]
    strategy = "STRICT_SPREAD" if len(bundles) > 1 else "PACK"
    group = ray.util.placement_group(bundles, strategy=strategy, **_label_selector(ray, nodes))
    try:
        deadline = time.monotonic() + timeout_s
        while not group.wait(min(1.0, timeout_s)):  # short waits, so that Ctrl-C is handled
            _check_alive(ray, placement, nodes)
            if time.monotonic() >= deadline:
                requested = "; ".join(f"{host.name}: {bundle}" for host, bundle in zip(placement.hosts, bundles))
                raise WaitTimedOut(f"Ray to reserve what others may be using ({requested})", timeout_s, setting)
        indexes = _bundle_indexes(ray, group, placement, nodes, bundles)
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
    return Reservation(group, tuple(node["NodeID"] for node in nodes), indexes, bundles)


def _label_selector(ray: Any, nodes: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
    """Return the argument that pins each bundle to its node; {} if this Ray has no label selectors."""
    can_select = "bundle_label_selector" in inspect.signature(ray.util.placement_group).parameters
    if not can_select or any(node.get("Labels", {}).get(_NODE_ID_LABEL) != node["NodeID"] for node in nodes):
        return {}
    return {"bundle_label_selector": [{_NODE_ID_LABEL: node["NodeID"]} for node in nodes]}


def _check_alive(ray: Any, placement: Placement, nodes: Sequence[Dict[str, Any]]) -> None:
    """Raise ClusterError if a node has ended: the wait for a bundle that is pinned to it would not end."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
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


def _bundle_for(node: Dict[str, Any], instances: int, ipus: int) -> Dict[str, float]:
    """Return the bundle of a host: a share of its cores (fractional, so that 4 instances fit on 2 cores), and IPUs."""
    resources = node["Resources"]
    bundle = {f"node:{node['NodeManagerAddress']}": 0.001}
    share = min(1.0, int(100 * resources.get("CPU", 0) / instances) / 100)
    if share:
        bundle["CPU"] = share * instances
    if ipus and "IPU" in resources:
        bundle["IPU"] = float(ipus)
    return bundle
