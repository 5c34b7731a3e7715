"""What a run holds of its hosts: one placement group with a bundle for each, all or none, each on its own Ray node.

Where Ray selects by labels, a bundle is pinned to the id of its node. Older Ray (2.10) pins by `node:<address>` alone,
a resource of every node of that address; there it is looked up afterwards on which node id each bundle has come to lie.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import time
from typing import Any, Dict, List, Sequence, Tuple

from raypod.errors import ClusterError, WaitTimedOut
from raypod.placement import Placement

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
