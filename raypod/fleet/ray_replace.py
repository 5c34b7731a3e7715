"""Where the replacement of a lost instance lives: its old place, a spare host, else beside others.

Which hosts still answer, only the try tells: Ray takes a minute to call a silent one dead. So an actor is started on
one host after the other, each for a bounded time.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from typing import Any, Callable, Dict, List, Sequence, Tuple

from raypod.errors import HostLost
from raypod.fleet.ray_nodes import Reservation, affinity_options, draining_nodes, host_name, is_named
from raypod.host.process import ticks_of
from raypod.plan.cluster import LOCAL
from raypod.plan.plan import Plan

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


# --- from fleet.ray_kill: Ending the process of an instance for certain: through Ray, and by its pid on its own host.
#
# Ray lets a process end itself first, and Ray 2.10 does nothing else: a frozen one would stay, and keep its place.
#

_ENDS_WITHIN_S = 10.0  # how long `close` waits for the hosts; one that is lost never answers


class Killer:
    """Of the actors of one fleet."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._end_process = ray.remote(end_process)
        self._processes: Dict[Any, Tuple[Dict[str, Any], Any]] = {}  # of each actor: its Ray node, what identifies it
        self._under_way: List[Any] = []

    def know(self, actor: Any, node: Dict[str, Any]) -> None:
        """Ask an actor that was just started which process it is: once it is frozen, it does not say."""
        self._processes[actor] = (node, actor.identity.remote())

    def kill(self, actor: Any) -> None:
        """End an actor that may still answer, or is dead already."""
        self._processes.pop(actor, None)
        self._ray.kill(actor)

    def kill_frozen(self, actor: Any) -> None:
        """End an actor that may not even listen. Does not wait for it, and does nothing to a host that is gone."""
        node, identity = self._processes.pop(actor, ({}, None))
        self._ray.kill(actor)
        if identity is None or not self._ray.wait([identity], timeout=0)[0]:
            return
        try:
            pid, started_ticks = self._ray.get(identity)
        except self._ray.exceptions.RayError:
            return  # it did not come to life
        options = {**affinity_options(node, 0), "max_retries": 0}
        del options["max_restarts"]
        self._under_way.append(self._end_process.options(**options).remote(pid, started_ticks))

    def close(self) -> None:
        """Wait until all have ended, within a bound."""
        if self._under_way:
            _, late = self._ray.wait(self._under_way, num_returns=len(self._under_way), timeout=_ENDS_WITHIN_S)
            for ref in late:
                self._ray.cancel(ref, force=True)
        self._under_way = []


def end_process(pid: int, started_ticks: int) -> None:
    """End a process of this host, unless the pid is another one's meanwhile (`record/run_state.py`)."""
    if ticks_of(pid) == started_ticks:
        os.kill(pid, signal.SIGKILL)
