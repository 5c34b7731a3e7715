"""Ray nodes of a placement: match them to hosts, wait for missing ones, find drained ones, compare their clocks.

A host's clock was read between the two times, so that their middle is wrong by at most half their distance.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, TypeVar

from raypod.errors import ClusterError, PodTooSmall
from raypod.events import ClockReading
from raypod.plan.cluster import LOCAL, Cluster, Host
from raypod.plan.placement import Placement
from raypod.system.command_line import counted

_T = TypeVar("_T")

_POLL_INTERVAL_S = 0.5
_LOG_INTERVAL_S = 10.0
_ANSWER_S = 60.0  # of the GCS, which a busy head host delays; Ray itself waits without a limit


def wait_for_nodes(
    ray: Any, placement: Placement, timeout_s: float, log: Callable[[str], None]
) -> List[Dict[str, Any]]:
    """Return the Ray node of every host of a placement, in order, once all are alive.

    `log` receives a line every 10 s while hosts are missing.

    Raises:
        PodTooSmall: hosts are still missing after `timeout_s` seconds, or have fewer IPUs than the plan needs.
        ClusterError: as `match_hosts`.
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
    return [host.name for host, node in zip(placement.hosts, nodes_of(ray, placement.hosts)) if not node]


def match_hosts(ray: Any, placement: Placement) -> List[Dict[str, Any]]:
    """Return the Ray node of every host of a placement, in order.

    Raises:
        PodTooSmall: hosts are missing, or have fewer IPUs than the plan needs.
        ClusterError: hosts are the same node.
    """
    alive = alive_nodes(ray)
    missing = missing_hosts(ray, placement)
    if missing:
        raise PodTooSmall(
            f"{placement.cluster.name}: no Ray node is alive on {', '.join(missing)}; "
            f"alive: {', '.join(node['NodeManagerAddress'] for node in alive)}"
        )
    nodes = nodes_of(ray, placement.hosts)
    same = [host.name for host, node in zip(placement.hosts, nodes) if nodes.count(node) > 1]
    if same:
        raise ClusterError(f"{placement.cluster.name}: {', '.join(same)} are names of one host; list it once")
    total = sum(each["Resources"].get("IPU", 0) for each in alive)
    for index, (host, node) in enumerate(zip(placement.hosts, nodes)):
        needed, available = placement.ipus_on(index), node["Resources"].get("IPU", 0)
        if total and needed > available:  # the hosts of an emulated pod have no IPU resource
            raise PodTooSmall(
                f"host {host.name} has {counted(int(available), 'IPU')} and the plan puts {needed} on it (the pod has "
                f"{total:g} in all, the plan needs {placement.sizes.total_ipus}); use fewer replicas or more hosts"
            )
    return nodes


def host_name(placement: Placement, node: Dict[str, Any]) -> str:
    """Return the name of a Ray node in the cluster file; its address if it is not in the file."""
    if placement.cluster.is_local:
        return placement.hosts[0].name
    names = [host.name for host in placement.cluster.hosts if _is_on(host, node)]
    return names[0] if names else str(node["NodeManagerAddress"])


def is_in_cluster(placement: Placement, node: Dict[str, Any]) -> bool:
    """Return whether a Ray node is a host of the placement's cluster."""
    return any(_is_on(host, node) for host in placement.cluster.hosts)


def alive_nodes(ray: Any) -> List[Dict[str, Any]]:
    """Return the live nodes of the cluster. ClusterError if Ray does not answer within 60 s."""
    return [node for node in _answer_of(ray.nodes) if node["Alive"]]


def nodes_of(ray: Any, hosts: Sequence[Host]) -> List[Dict[str, Any]]:
    """Return the live node of each host; {} for none."""
    alive = alive_nodes(ray)

    def is_node_of(host: Host, node: Dict[str, Any]) -> bool:
        if host.address == LOCAL.hosts[0].address:
            return bool(node["NodeID"] == ray.get_runtime_context().get_node_id())
        return _is_on(host, node)

    return [next((node for node in alive if is_node_of(host, node)), {}) for host in hosts]


def peers_of(ray: Any, cluster: Cluster) -> List[str]:
    """Return the hosts of a cluster with a live node that Ray does not drain, from the one after this host on.

    This host, and further names of a host, are left out.
    """
    own, draining = ray.get_runtime_context().get_node_id(), draining_nodes()
    nodes = nodes_of(ray, cluster.hosts)
    first = next((index for index, node in enumerate(nodes) if node and node["NodeID"] == own), -1) + 1
    found: Dict[str, str] = {}
    for index in (*range(first, len(nodes)), *range(first)):
        node = nodes[index]
        if node and node["NodeID"] != own and node["NodeID"] not in draining:
            found.setdefault(node["NodeID"], cluster.hosts[index].name)
    return list(found.values())


def _is_on(host: Host, node: Dict[str, Any]) -> bool:
    return host.address in (node["NodeManagerAddress"], node["NodeManagerHostname"], node.get("NodeName"))


def draining_hosts(placement: Placement, nodes: List[Dict[str, Any]]) -> List[str]:
    """Return the names of the hosts among `nodes` that Ray is draining (`ray drain-node`, or a cloud preemption)."""
    draining = draining_nodes()
    return list(dict.fromkeys(host_name(placement, node) for node in nodes if node["NodeID"] in draining))


def draining_nodes() -> Set[str]:
    """Return the ids of the nodes that Ray is draining. Ray schedules nothing on them.

    Ray has no public API for this. With a Ray version without the private one, no node is considered draining.
    """
    try:
        get_draining_nodes = importlib.import_module("ray._private.state").state.get_draining_nodes
    except (ImportError, AttributeError) as error:
        _log_missing_api(str(error))
        return set()
    return set(_answer_of(get_draining_nodes))


def _answer_of(question: Callable[[], _T]) -> _T:
    """Return what a call to the GCS returns, for which Ray sets no limit; raise what it raises."""
    answers: List[_T] = []
    errors: List[BaseException] = []

    def ask() -> None:
        try:
            answers.append(question())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask, name="question to Ray", daemon=True)
    thread.start()
    thread.join(_ANSWER_S)
    if errors:
        raise errors[0]
    if not answers:
        raise ClusterError(f"Ray's GCS has not answered this process for {_ANSWER_S:g} s; start again, or restart Ray")
    return answers[0]


@functools.lru_cache(maxsize=None)
def _log_missing_api(cause: str) -> None:
    """Log once that draining hosts cannot be detected."""
    logging.getLogger(__name__).warning("this version of Ray does not report draining hosts: %s", cause)


_ATTEMPTS = 8  # per host: the fastest reply counts
_WITHIN_S = 1.0  # for all hosts together
_HOST_S = 0.3  # for one reply: an instance may be frozen


def read_clocks(ray: Any, actors: Sequence[Any], nodes: Sequence[str]) -> Dict[int, ClockReading]:
    """Return the reading of each instance whose host replies; `nodes` holds the Ray node of each actor.

    Instances of a host share its clock, and the first one that replies reads it.
    """
    deadline_s = time.monotonic() + _WITHIN_S
    found: Dict[str, ClockReading] = {}
    for actor, node in zip(actors, nodes):
        if node not in found:
            reading = best_reading(lambda asked=actor: _ask(ray, asked), deadline_s)  # type: ignore[misc]
            if reading is not None:
                found[node] = reading
    return {index: found[node] for index, node in enumerate(nodes) if node in found}


def best_reading(ask: Callable[[], Optional[float]], deadline_s: float) -> Optional[ClockReading]:
    """Return the reading of the fastest of several requests; None if there is no reply, or no time is left.

    Args:
        ask: requests and returns the other clock in seconds; None if there is no reply.
        deadline_s: monotonic time of this host.
    """
    readings: List[ClockReading] = []
    for _ in range(_ATTEMPTS):
        sent_s = time.monotonic()
        if sent_s >= deadline_s:
            break
        clock_s = ask()
        if clock_s is None:
            break
        arrived_s = time.monotonic()
        readings.append(ClockReading(clock_s - (sent_s + arrived_s) / 2, (arrived_s - sent_s) / 2))
    return min(readings, key=lambda each: each.error_s) if readings else None


def _ask(ray: Any, actor: Any) -> Optional[float]:
    reply = actor.clock.remote()
    ready, _ = ray.wait([reply], timeout=_HOST_S)
    if not ready:
        return None
    try:
        return float(ray.get(reply))
    except ray.exceptions.RayError:  # the instance is lost, which the watch reports
        return None
