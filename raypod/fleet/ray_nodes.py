"""Which Ray node is which host of a placement; hosts that are not there yet are waited for, by name."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import time
from typing import Any, Callable, Dict, List, Sequence, Set, Tuple

from raypod.errors import ClusterError, WaitTimedOut
from raypod.plan.cluster import LOCAL, Host
from raypod.plan.placement import Placement

_LOOK_EVERY_S = 0.5
_TELL_EVERY_S = 10.0


def await_hosts(ray: Any, placement: Placement, wait_s: float, tell: Callable[[str], None]) -> List[Dict[str, Any]]:
    """The Ray node of every host of a placement, in order, once all are alive; `tell` gets a line while they are not.

    Raises:
        ClusterError: after `wait_s` seconds some are missing still; or IPUs that a host does not have. By name.
    """
    deadline, told_s = time.monotonic() + wait_s, -_TELL_EVERY_S
    while missing_hosts(ray, placement) and time.monotonic() < deadline:
        if time.monotonic() - told_s > _TELL_EVERY_S:
            told_s, left_s = time.monotonic(), deadline - time.monotonic()
            tell(f"waiting for {', '.join(missing_hosts(ray, placement))} ({left_s:.0f} s more, --wait-hosts)")
        time.sleep(min(_LOOK_EVERY_S, max(0.0, deadline - time.monotonic())))
    return match_hosts(ray, placement)


def draining_hosts(ray: Any, placement: Placement, nodes: List[Dict[str, Any]]) -> List[str]:
    """The hosts among `nodes` that Ray is draining, by name: `ray drain-node`, or a cloud that takes them back."""
    drained = draining_nodes(ray)
    names = {host_name(placement, node): None for node in nodes if node["NodeID"] in drained}
    return list(names)


def draining_nodes(ray: Any) -> Set[str]:
    """The ids of the nodes that Ray is draining: it starts nothing there any more."""
    return set(ray._private.state.state.get_draining_nodes())


def missing_hosts(ray: Any, placement: Placement) -> List[str]:
    """The hosts of a placement that no living Ray node is on."""
    return [host.name for host, node in zip(placement.hosts, _nodes_of(ray, placement)) if not node]


def match_hosts(ray: Any, placement: Placement) -> List[Dict[str, Any]]:
    """The Ray node of every host of a placement, in order.

    Raises:
        ClusterError: hosts that are not there, or IPUs that they do not have, by name.
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
        needed, has = placement.ipus_on(index), node["Resources"].get("IPU", 0)
        if total and needed > has:  # no host of an emulated pod has any
            raise ClusterError(
                f"host {host.name} has {has:g} IPUs and the plan puts {needed} on it (the pod has {total:g} in all, "
                f"the plan needs {placement.total_ipus}); use fewer replicas or more hosts"
            )
    return nodes


def host_name(placement: Placement, node: Dict[str, Any]) -> str:
    """The name of a Ray node in the cluster file; for one that is not in it, its address."""
    if placement.cluster is LOCAL:
        return placement.hosts[0].name
    names = [host.name for host in placement.cluster.hosts if _is(host, node)]
    return names[0] if names else str(node["NodeManagerAddress"])


def is_named(placement: Placement, node: Dict[str, Any]) -> bool:
    """Whether a Ray node is a host of the placement's cluster."""
    return any(_is(host, node) for host in placement.cluster.hosts)


def _nodes_of(ray: Any, placement: Placement) -> List[Dict[str, Any]]:
    """The living node of each host; {} where there is none."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    if placement.cluster is LOCAL:
        own = ray.get_runtime_context().get_node_id()
        return [node for node in alive if node["NodeID"] == own]
    return [next((node for node in alive if _is(host, node)), {}) for host in placement.hosts]


def _is(host: Host, node: Dict[str, Any]) -> bool:
    return host.address in (node["NodeManagerAddress"], node["NodeManagerHostname"], node.get("NodeName"))


# --- from fleet.ray_reservation: What a run holds of its hosts: one placement group with a bundle for each, all or none, each on its own Ray node.
#
# Where Ray selects by labels, a bundle is pinned to the id of its node. Older Ray (2.10) pins by `node:<address>` alone,
# a resource of every node of that address; there it is looked up afterwards on which node id each bundle has come to lie.
#

_NODE_ID_LABEL = "ray.io/node-id"  # Ray puts it on every node


@dataclasses.dataclass(frozen=True)
class Reservation:
    """A placement group, and for each host, in their order: its Ray node, which bundle lies there, what that holds."""

    group: Any
    node_ids: Tuple[str, ...]
    indexes: Tuple[int, ...]
    bundles: List[Dict[str, float]]

    def options(self, host_index: int, share: int) -> Dict[str, Any]:
        """Options of an actor that takes one of `share` equal parts of a host's bundle."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        bundle = self.bundles[host_index]
        strategy = strategies.PlacementGroupSchedulingStrategy(self.group, self.indexes[host_index])
        options: Dict[str, Any] = {
            "num_cpus": bundle.get("CPU", 0) / share,
            "max_restarts": 0,
            "scheduling_strategy": strategy,
        }
        if "IPU" in bundle:
            options["resources"] = {"IPU": bundle["IPU"] / share}
        return options


def reserve(ray: Any, placement: Placement, nodes: List[Dict[str, Any]], bound: Tuple[float, str]) -> Reservation:
    """One bundle on each of `nodes`, all or none; `bound` is how long to wait in seconds, and what sets it.

    Raises:
        WaitTimedOut: others are using what is asked for.
        ClusterError: a node has ended meanwhile, or cannot be told from another of its address.
    """
    timeout_s, setting = bound
    counts = [len(placement.instances_on(index)) for index in range(len(nodes))]
    bundles = [
        _bundle_for(node, count, placement.ipus_on(index)) for index, (node, count) in enumerate(zip(nodes, counts))
    ]
    strategy = "STRICT_SPREAD" if len(bundles) > 1 else "PACK"
    group = ray.util.placement_group(bundles, strategy=strategy, **_pins(ray, nodes))
    try:
        deadline = time.monotonic() + timeout_s
        while not group.wait(min(1.0, timeout_s)):  # short waits, so that Ctrl-C is heard
            _check_alive(ray, placement, nodes)
            if time.monotonic() >= deadline:
                asked = "; ".join(f"{host.name}: {bundle}" for host, bundle in zip(placement.hosts, bundles))
                raise WaitTimedOut(f"Ray to reserve what others may be using ({asked})", timeout_s, setting)
        indexes = _indexes(ray, group, placement, nodes, bundles)
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
    return Reservation(group, tuple(node["NodeID"] for node in nodes), indexes, bundles)


def affinity_options(node: Dict[str, Any], ipus: int) -> Dict[str, Any]:
    """Options of an actor on a node of its own choice, outside of any reservation; it takes `ipus` IPUs there."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    strategy = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": strategy}
    return {**options, "resources": {"IPU": float(ipus)}} if ipus else options


def _pins(ray: Any, nodes: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
    """What pins each bundle to the id of its node, where this Ray can do that."""
    can_select = "bundle_label_selector" in inspect.signature(ray.util.placement_group).parameters
    if not can_select or any(node.get("Labels", {}).get(_NODE_ID_LABEL) != node["NodeID"] for node in nodes):
        return {}
    return {"bundle_label_selector": [{_NODE_ID_LABEL: node["NodeID"]} for node in nodes]}


def _check_alive(ray: Any, placement: Placement, nodes: Sequence[Dict[str, Any]]) -> None:
    """A bundle that is pinned to a node that is gone would be waited for in vain."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    gone = [host.name for host, node in zip(placement.hosts, nodes) if node["NodeID"] not in alive]
    if gone:
        raise ClusterError(f"the Ray node of {', '.join(gone)} has ended while it was to be reserved; start again")


def _indexes(
    ray: Any, group: Any, placement: Placement, nodes: Sequence[Dict[str, Any]], bundles: Sequence[Dict[str, float]]
) -> Tuple[int, ...]:
    """Which bundle lies on the node of each host: its own, or an equal one of a host with the same address."""
    lies_on = ray.util.placement_group_table(group)["bundles_to_node_id"]
    found = []
    for host, node, bundle in zip(placement.hosts, nodes, bundles):
        there = [index for index, other in enumerate(bundles) if lies_on[index] == node["NodeID"] and other == bundle]
        if not there:
            raise ClusterError(
                f"{host.name}: several Ray nodes have the address {node['NodeManagerAddress']}, and this Ray cannot "
                "tell them apart; leave one of them there, or give each an address of its own"
            )
        found.append(there[0])
    return tuple(found)


def _bundle_for(node: Dict[str, Any], instances: int, ipus: int) -> Dict[str, float]:
    """What a host's instances reserve: a share of its cores (fractional, so that 4 fit on 2 cores), IPUs, the host."""
    resources = node["Resources"]
    bundle = {f"node:{node['NodeManagerAddress']}": 0.001}
    share = min(1.0, int(100 * resources.get("CPU", 0) / instances) / 100)
    if share:
        bundle["CPU"] = share * instances
    if ipus and "IPU" in resources:
        bundle["IPU"] = float(ipus)
    return bundle
