"""The room for replicas on the hosts of a cluster: which of its Ray nodes are alive, and which of these respond."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List, Tuple

from raypod.plan.cluster import Host
from raypod.plan.elastic import Room
from raypod.plan.plan import Plan
from raypod.runtime.workers.ray_nodes import alive_nodes, draining_nodes, nodes_of
from raypod.runtime.workers.ray_reservation import node_affinity

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
        return [room for task, room in probes.items() if task in ready and self._succeeded(task)]

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

    def _succeeded(self, task: Any) -> bool:
        try:
            self._ray.get(task)
        except self._ray.exceptions.RayError:
            return False
        return True


def _respond() -> None:
    """Do nothing: the process has started."""
