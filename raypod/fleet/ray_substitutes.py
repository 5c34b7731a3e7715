"""Where the replacement of a lost instance lives: its old place, a spare host, else beside others.

Which hosts still answer, only the try tells: Ray takes a minute to call a silent one dead. So an actor is started on
one host after the other, each for a bounded time.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, List, Sequence, Tuple

from raypod.cluster import LOCAL
from raypod.errors import HostLost
from raypod.fleet.ray_kill import Killer
from raypod.fleet.ray_nodes import draining_nodes, host_name, is_named
from raypod.fleet.ray_reservation import Reservation, affinity_options
from raypod.plan import Plan

_ANSWERS_WITHIN_S = 10.0  # an actor's process on a host that is there; its imports come later


@dataclasses.dataclass(frozen=True)
class Place:
    """An actor, and the Ray node it lives on."""

    actor: Any
    node: Dict[str, Any]


class Substitutes:
    """Starts actors in the places of dead ones."""

    def __init__(self, ray: Any, plan: Plan, reservation: Reservation, killer: Killer) -> None:
        self._ray, self._plan, self._reservation, self._killer = ray, plan, reservation, killer
        start_timeout_s = plan.config.run.start_timeout_s
        self._timeout_s, self._start_timeout_s = min(_ANSWERS_WITHIN_S, start_timeout_s), start_timeout_s

    def place(
        self,
        lost: Sequence[int],
        nodes: List[Dict[str, Any]],
        may_share_hosts: bool,
        start: Callable[[int, Dict[str, Any], Dict[str, Any]], Any],
    ) -> Dict[int, Place]:
        """An actor that answers for each of `lost`; `nodes` are those of all instances before.

        Raises:
            HostLost: no host takes it.
        """
        found: Dict[int, Place] = {}
        untried = {index: self._candidates(index, lost, nodes, may_share_hosts) for index in lost}
        while len(found) < len(lost):
            tried: Dict[Any, Tuple[int, Place]] = {}
            for index in lost:
                if index not in found:
                    node = self._next(index, nodes[index], untried[index])
                    actor = start(index, node, self._options(index, node, nodes[index], may_share_hosts))
                    tried[actor.beat.remote()] = (index, Place(actor, node))
            # Where no other host is left, nothing is gained by giving up early.
            timeout_s = self._timeout_s if any(untried.values()) else self._start_timeout_s
            answered, _ = self._ray.wait(list(tried), num_returns=len(tried), timeout=timeout_s)
            for ref, (index, place) in tried.items():
                if ref in answered and self._is_sound(ref):
                    found[index] = place
                else:
                    self._killer.kill_frozen(place.actor)
        return found

    def has_room_for(self, moving: Sequence[int], nodes: List[Dict[str, Any]], may_share_hosts: bool) -> bool:
        """Whether there is another node for each of `moving`, as far as Ray knows.

        None if the coordinator itself has to move: it cannot.
        """
        if self._ray.get_runtime_context().get_node_id() in draining_nodes(self._ray):
            return False
        candidates = [self._candidates(index, moving, nodes, may_share_hosts) for index in moving]
        different = {node["NodeID"] for each in candidates for node in each}
        return all(candidates) and (may_share_hosts or len(different) >= len(moving))

    def _candidates(
        self, index: int, lost: Sequence[int], nodes: List[Dict[str, Any]], may_share_hosts: bool
    ) -> List[Dict[str, Any]]:
        """The living nodes on which it may go, best first."""
        own, placement = nodes[index]["NodeID"], self._plan.placement
        draining = draining_nodes(self._ray)
        alive = [node for node in self._ray.nodes() if node["Alive"] and node["NodeID"] not in draining]
        used = {node["NodeID"] for other, node in enumerate(nodes) if other not in lost}
        order = [node for node in alive if node["NodeID"] == own]
        if placement.cluster is not LOCAL:
            others = [node for node in alive if node["NodeID"] != own and is_named(placement, node)]
            order += [node for node in others if node["NodeID"] not in used]
            order += [node for node in others if node["NodeID"] in used and may_share_hosts]
        return order

    def _next(self, index: int, own: Dict[str, Any], untried: List[Dict[str, Any]]) -> Dict[str, Any]:
        if not untried:
            lost_host = host_name(self._plan.placement, own)
            cause = "neither it nor a spare host of the cluster answers; bring one back, then go on with --resume"
            raise HostLost(lost_host, (index,), cause, self._plan.log_file(index))
        return untried.pop(0)

    def _options(self, index: int, node: Dict[str, Any], before: Dict[str, Any], may_share: bool) -> Dict[str, Any]:
        """In its own part of the reservation where that still is, else on the node, with IPUs of its own."""
        spec = self._plan.instances[index]
        if node["NodeID"] == before["NodeID"] == self._reservation.node_ids[spec.host_index]:
            return self._reservation.options(spec.host_index, len(self._plan.instances_on(spec.host_index)))
        has_ipus = "IPU" in self._reservation.bundles[spec.host_index]
        return affinity_options(node, self._plan.placement.local_ipus if has_ipus and not may_share else 0)

    def _is_sound(self, ref: Any) -> bool:
        try:
            self._ray.get(ref)
        except self._ray.exceptions.RayError:
            return False
        return True
