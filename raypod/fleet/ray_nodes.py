"""Which Ray node is which host of a placement; hosts that are not there yet are waited for, by name."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List, Set

from raypod.cluster import LOCAL, Host
from raypod.errors import ClusterError
from raypod.placement import Placement

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
