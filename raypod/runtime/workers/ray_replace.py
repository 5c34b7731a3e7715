"""Replace lost instances: kill their processes, and begin on a standby, or in a new actor on a host with room.

They wait on the hosts of the plan, whose resources are reserved. A replacement on another host starts a new process.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from raypod.errors import HostLost, summarize_exception
from raypod.plan.plan import Plan
from raypod.runtime.workers.ray_nodes import alive_nodes, draining_nodes, host_name, is_in_cluster
from raypod.runtime.workers.ray_reservation import Reservation, has_succeeded, node_affinity
from raypod.runtime.workers.ray_wait import death_reason
from raypod.system.activity_record import Identity
from raypod.system.process import process_start_ticks
from raypod.training.checkpoint.resume import way_to_continue

_ACTOR_START_S = 10.0  # for the process of an actor to start on a responsive host; its imports come later
_ELASTIC_START_S = 30.0  # the same on the last host to try, if the run can continue without it
_POLL_S = 0.2
_KILL_S = 10.0  # for the hosts to kill processes; an unreachable one never does


class ProcessKiller:
    """Kills the processes of a fleet's actors, through Ray and, if they are frozen, by pid on their hosts.

    `ray.kill` first lets a process end itself, and Ray 2.10 does nothing else: a frozen process would remain and keep
    its resources.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._processes: Dict[Any, Tuple[Dict[str, Any], Any]] = {}  # of each actor: its Ray node, its identity
        self._pending: List[Any] = []

    def register(self, actor: Any, node: Dict[str, Any]) -> None:
        """Request the pid of a new actor's process. Once it is frozen, it does not reply."""
        self._processes[actor] = (node, actor.identity.remote())

    def kill(self, actor: Any) -> None:
        """Kill an actor that responds or is dead."""
        self._processes.pop(actor, None)
        self._ray.kill(actor)

    def kill_frozen(self, actor: Any) -> None:
        """Kill an actor that may not respond. Does not wait for it."""
        task = self.on_its_host(kill_process, actor)
        self._processes.pop(actor, None)
        self._ray.kill(actor)
        if task is not None:
            self._pending.append(task)

    def on_its_host(self, function: Callable[[Identity], Any], actor: Any) -> Any:
        """Call a function with the identity of an actor's process, in another process of its host: this one, or a task.

        Returns the reference of the result; None if the process has not started, or is not registered any more.
        """
        node, identity = self._processes.get(actor, ({}, None))
        if identity is None or not self._ray.wait([identity], timeout=0)[0]:
            return None
        try:
            found = self._ray.get(identity)
        except self._ray.exceptions.RayError:
            return None
        if node["NodeID"] == self._ray.get_runtime_context().get_node_id():
            return self._ray.put(function(found))
        return self._ray.remote(function).options(**node_affinity(node), max_retries=0).remote(found)

    def close(self) -> None:
        """Wait until all processes have been killed; cancel what takes too long."""
        if self._pending:
            _, late = self._ray.wait(self._pending, num_returns=len(self._pending), timeout=_KILL_S)
            for ref in late:
                self._ray.cancel(ref, force=True)
        self._pending = []


def kill_process(identity: Identity) -> None:
    """Kill a process of this host, unless its pid was reused."""
    if process_start_ticks(identity.pid) == identity.start_ticks:
        os.kill(identity.pid, signal.SIGKILL)


@dataclasses.dataclass(frozen=True)
class Replacement:
    """An actor, and the Ray node it runs on."""

    actor: Any
    node: Dict[str, Any]


class Replacements:
    """Starts actors in the place of lost ones."""

    def __init__(
        self,
        ray: Any,
        plan: Plan,
        reservation: Reservation,
        killer: ProcessKiller,
        must_leave: Callable[[], bool] = lambda: False,
    ) -> None:
        """`must_leave`: see `ElasticFleet.must_leave`."""
        self._ray, self._plan, self._reservation, self._killer = ray, plan, reservation, killer
        self._must_leave = must_leave
        self._start_timeout_s = plan.config.run.start_timeout_s
        # Without further candidates an early timeout has no advantage, unless the run can continue without the host.
        is_elastic = plan.config.pod.is_elastic
        self._last_timeout_s = min(_ELASTIC_START_S, self._start_timeout_s) if is_elastic else self._start_timeout_s

    def start(
        self,
        lost: Sequence[int],
        nodes: List[Dict[str, Any]],
        may_share_hosts: bool,
        start_actor: Callable[[int, Dict[str, Any], Dict[str, Any]], Any],
    ) -> Dict[int, Replacement]:
        """Start a responding actor for each of `lost`. `nodes` holds the previous node of every instance.

        Ray needs about a minute to mark a node dead, so each candidate node is probed by starting an actor on it with
        a timeout. Instances of different hosts get different nodes as long as there are such.

        Raises:
            HostLost: no node is left to try, or the process must leave.
        """
        found: Dict[int, Replacement] = {}
        untried = {index: self._candidates(index, lost, nodes, may_share_hosts) for index in lost}
        while len(found) < len(lost):
            probes: Dict[Any, Tuple[int, Replacement]] = {}
            taken = {each.node["NodeID"]: nodes[index]["NodeID"] for index, each in found.items()}
            missing = [each for each in lost if each not in found]
            for index, node in self._next_nodes(missing, nodes, untried, taken, may_share_hosts, found):
                actor = start_actor(index, node, self._options(index, node, nodes[index], may_share_hosts))
                probes[actor.beat.remote()] = (index, Replacement(actor, node))
            has_more = any(_free(nodes[each], untried[each], taken, may_share_hosts) for each in missing)
            timeout_s = min(_ACTOR_START_S, self._start_timeout_s) if has_more else self._last_timeout_s
            ready = self._ready(list(probes), timeout_s)
            for ref, (index, replacement) in probes.items():
                if ref in ready and has_succeeded(self._ray, ref):
                    found[index] = replacement
                else:
                    self._killer.kill_frozen(replacement.actor)
        return found

    def _ready(self, probes: List[Any], timeout_s: float) -> List[Any]:
        """Return those that are ready within a time, or when the process must leave."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            ready: List[Any] = self._ray.wait(probes, num_returns=len(probes), timeout=max(0, min(left_s, _POLL_S)))[0]
            if len(ready) == len(probes) or left_s <= 0 or self._must_leave():
                return ready

    def has_room_for(self, moving: Sequence[int], nodes: List[Dict[str, Any]], may_share_hosts: bool) -> bool:
        """Return whether there is a node for each of `moving`; False if the coordinator's own node is draining."""
        if self._ray.get_runtime_context().get_node_id() in draining_nodes():
            return False
        candidates = [self._candidates(index, moving, nodes, may_share_hosts) for index in moving]
        different = {node["NodeID"] for each in candidates for node in each}
        return all(candidates) and (may_share_hosts or len(different) >= len(moving))

    def _candidates(
        self, index: int, lost: Sequence[int], nodes: List[Dict[str, Any]], may_share_hosts: bool
    ) -> List[Dict[str, Any]]:
        """Return the live nodes for an instance, best first: its own, unused ones, used ones."""
        own, placement = nodes[index]["NodeID"], self._plan.placement
        draining = draining_nodes()
        alive = [node for node in alive_nodes(self._ray) if node["NodeID"] not in draining]
        used = {node["NodeID"] for other, node in enumerate(nodes) if other not in lost}
        candidates = [node for node in alive if node["NodeID"] == own]
        if not placement.cluster.is_local:
            others = [node for node in alive if node["NodeID"] != own and is_in_cluster(placement, node)]
            candidates += [node for node in others if node["NodeID"] not in used]
            candidates += [node for node in others if node["NodeID"] in used and may_share_hosts]
        return candidates

    def _next_nodes(
        self,
        missing: Sequence[int],
        nodes: List[Dict[str, Any]],
        untried: Dict[int, List[Dict[str, Any]]],
        taken: Dict[str, str],
        may_share_hosts: bool,
        found: Dict[int, Replacement],
    ) -> List[Tuple[int, Dict[str, Any]]]:
        """Return the next node to try for each of `missing`. If one has none, end the actors that were `found`.

        `taken` maps the ids of nodes that replacements have, or try, to that of the node that they have lost.
        """
        chosen = []
        for index in missing:
            free = _free(nodes[index], untried[index], taken, may_share_hosts)
            if not free or self._must_leave():
                for replacement in found.values():
                    self._killer.kill(replacement.actor)
                raise self._host_lost(index, nodes[index])
            node = free[0]
            untried[index].remove(node)
            taken.setdefault(node["NodeID"], nodes[index]["NodeID"])
            chosen.append((index, node))
        return chosen

    def _host_lost(self, index: int, own: Dict[str, Any]) -> HostLost:
        cause = (
            "neither this host nor any other host that may run the instance responds; restart a host, then "
            f"{way_to_continue(self._plan.run_dir)}"
        )
        return HostLost(host_name(self._plan.placement, own), (index,), cause, self._plan.log_file(index))

    def _options(self, index: int, node: Dict[str, Any], before: Dict[str, Any], may_share: bool) -> Dict[str, Any]:
        """Return the options of an actor: its part of the reservation if that is on `node`, else node affinity."""
        placement = self._plan.placement
        host_index = placement.instances[index].host_index
        if node["NodeID"] == before["NodeID"] == self._reservation.node_ids[host_index]:
            return self._reservation.options(host_index, len(placement.instances_on(host_index)))
        options = {**node_affinity(node), "max_restarts": 0}
        if "IPU" in self._reservation.bundles[host_index] and not may_share:
            options["resources"] = {"IPU": float(placement.sizes.local_ipus)}
        return options


def _free(
    own: Dict[str, Any], untried: List[Dict[str, Any]], taken: Dict[str, str], may_share_hosts: bool
) -> List[Dict[str, Any]]:
    """Return the untried nodes that no replacement of another node than `own` has; if there is none, those to share."""
    free = [node for node in untried if taken.get(node["NodeID"], own["NodeID"]) == own["NodeID"]]
    return free or (untried if may_share_hosts else [])


_WITHIN_S = 5.0  # for a standby to be prepared, and to begin; then a new process starts
_HOW = "continued by a standby"

StartActor = Callable[[Optional[int], Dict[str, Any], Dict[str, Any]], Any]


class Standbys:
    """The standbys of a plan: `run.standby` on each of its hosts."""

    def __init__(
        self, ray: Any, plan: Plan, start: StartActor, kill: Callable[[Any], None], log: Callable[[str], None]
    ) -> None:
        """
        Args:
            start: starts an actor with this index, None for a standby, on a Ray node, with these options.
            kill: ends an actor that may not respond.
            log: receives a line for the user about a standby that cannot be used.
        """
        self._ray, self._plan, self._start, self._kill, self._log = ray, plan, start, kill, log
        self._waiting: Dict[str, List[Tuple[Any, Any]]] = {}  # by node: actors, and the results of their preparation

    def fill(self, nodes: Sequence[Dict[str, Any]]) -> None:
        """Start those that are missing on the nodes of the plan's hosts, in host order. Does not wait for them."""
        for host_index, node in enumerate(nodes):
            waiting = self._waiting.setdefault(node["NodeID"], [])
            while len(waiting) < self._plan.config.run.standby:
                actor = self._start(None, node, {**node_affinity(node), "max_restarts": 0})
                waiting.append((actor, actor.prepare.remote(host_index)))

    def take(self, index: int, node: Dict[str, Any]) -> Optional[Any]:
        """Return a standby on a node that has begun as instance `index`; None if there is none."""
        waiting = self._waiting.get(node["NodeID"], [])
        deadline_s = time.monotonic() + _WITHIN_S
        while waiting:
            preparations = [preparation for _, preparation in waiting]
            # One that is being prepared is ahead of a new process.
            ready, _ = self._ray.wait(preparations, timeout=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                self._log(f"{self._about(index)}: not prepared within {_WITHIN_S:g} s")
                return None
            actor, preparation = waiting.pop(preparations.index(ready[0]))
            try:
                self._ray.get(preparation)
                self._ray.get(actor.begin.remote(index, _HOW), timeout=_WITHIN_S)
                return actor
            except self._ray.exceptions.RayError as error:
                self._kill(actor)
                self._log(f"{self._about(index)}: {self._reason(error)}")
        return None

    def _about(self, index: int) -> str:
        return f"a standby on {self._plan.placement.instances[index].host} cannot be used for instance {index}"

    def _reason(self, error: Exception) -> str:
        errors = self._ray.exceptions
        if isinstance(error, errors.GetTimeoutError):
            return f"it did not respond within {_WITHIN_S:g} s"
        return summarize_exception(error.cause) if isinstance(error, errors.RayTaskError) else death_reason(str(error))

    def close(self) -> None:
        """End all standbys."""
        for waiting in self._waiting.values():
            for actor, _ in waiting:
                self._kill(actor)
        self._waiting = {}
