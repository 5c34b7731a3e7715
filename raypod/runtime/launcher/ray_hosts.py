"""The hosts of a launch on Ray: a placement group with one bundle per host, and one actor on each host.

Every `read` of a live actor returns within a bound, so a host that does not answer in time is lost, even if Ray still
reports its node as alive.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from raypod.errors import HostLost, RaypodError, RunError, WaitTimedOut
from raypod.plan.placement import Placement
from raypod.runtime.launcher.host_process import HostProcess
from raypod.runtime.launcher.records import HostFacts, HostReport, Program
from raypod.runtime.workers.ray_nodes import match_hosts
from raypod.runtime.workers.ray_reservation import Reservation, reserve
from raypod.runtime.workers.ray_session import RaySession
from raypod.runtime.workers.ray_wait import Arrival, PauseDetector, death_reason, take_ready
from raypod.system.process import StepTimer

_READ_S = 1.0  # longest duration of a `read`
_LOST_S = 10.0  # a host is lost if its `read` takes this much longer
_SIGNAL_S = 0.2  # longest wait that does not handle SIGINT
_SETTING = "--start-timeout"


class RayHosts:
    """The hosts of a placement, in the order of the placement. See `supervision.Hosts`."""

    def __init__(self, placement: Placement, cluster_file: Optional[str], start_timeout_s: float) -> None:
        self._placement, self._timeout_s, self._logs = placement, start_timeout_s, "none yet"
        self._session = RaySession(placement, cluster_file, HostProcess.__module__, (start_timeout_s, _SETTING))
        self._ray: Any = None
        self._reservation: Optional[Reservation] = None
        self._actors: List[Any] = []
        self._addresses: List[str] = []
        self._reads: Dict[Any, Tuple[int, float]] = {}  # pending calls: (host, start time)
        self._stdin: Any = None  # the pending write
        self._done: List[bool] = [False] * len(placement.hosts)
        self.interpreters: List[str] = []  # of the programs, by host
        self.warnings: List[str] = []  # of `connect`, for the user
        self._pauses = PauseDetector()
        self._timer = StepTimer()
        self.start_seconds = self._timer.steps

    def join(self, log: Callable[[str], None]) -> None:
        """Join or start Ray, which replaces the signal handlers."""
        self._timer.begin()
        self._ray = self._session.open(log)
        self._timer.end("start or join Ray")

    def open(self) -> None:
        """Create the placement group, and start an actor on every host."""
        self._timer.begin()
        nodes = match_hosts(self._ray, self._placement)
        self._addresses = [node["NodeManagerAddress"] for node in nodes]
        self._reservation = reserve(self._ray, self._placement, nodes, (self._timeout_s, _SETTING))
        self._timer.end("reserve the hosts")
        actor_class = self._ray.remote(HostProcess)
        for index in range(len(nodes)):
            options = self._reservation.options(index, 1)
            options["max_concurrency"] = 4  # so that `end` runs during a `read`
            self._actors.append(actor_class.options(**options).remote())
        own = self._ray.get_runtime_context().get_node_id()
        chosen = [sys.executable if node["NodeID"] == own else self._placement.cluster.python for node in nodes]
        self.interpreters = self._call("interpreter", [(each,) for each in chosen])
        self._timer.end("start an actor on every host")

    def connect(self, subnet: Optional[str], instances: int) -> List[HostFacts]:
        """Determine the address of every host; with several instances, open their rendezvous on the first host."""
        hosts, chosen = self._addresses, [""] * len(self._actors)
        if subnet:
            hosts = chosen = self._call("address_in", [(subnet,) for _ in self._actors])
        if instances == 1:
            return [HostFacts(address, {}) for address in hosts]
        rendezvous: Dict[str, str] = self._call("open_rendezvous", [(hosts[0],)], self._actors[:1])[0]
        facts: List[HostFacts] = self._call("join_rendezvous", [(rendezvous, own) for own in chosen])
        self.warnings = [
            f"host {host.name}: a program that uses Horovod aborts: {own.horovod_problem}"
            for host, own in zip(self._placement.hosts, facts)
            if own.horovod_problem and len(facts) > 1
        ]
        return facts

    def start(self, programs: Sequence[Sequence[Program]], grace_s: float, logs: str) -> None:
        """Start the programs of every host; `logs` is the folder of their log files."""
        self._logs = logs
        self._timer.begin()
        self._call("start", [(tuple(each), grace_s) for each in programs])
        self._timer.end("start the programs")

    def reports(self, within_s: float) -> Iterator[Tuple[int, HostReport]]:
        """Yield (host index, report) for the reports that arrive within a time.

        Raises:
            HostLost: A host died or has not answered in time.
        """
        pending = {host for host, _ in self._reads.values()}
        for host, actor in enumerate(self._actors):
            if host not in pending and not self._done[host]:
                self._reads[actor.read.remote(_READ_S)] = (host, time.monotonic())
        arrived = [(self._reads.pop(each.ref)[0], each) for each in take_ready(self._ray, self._reads, within_s)]
        now_s, paused_s = time.monotonic(), self._pauses.poll()
        if paused_s:  # this process was stopped or blocked: answers that arrived then are not read yet
            self._reads = {ref: (host, min(now_s, sent_s + paused_s)) for ref, (host, sent_s) in self._reads.items()}
        late = [host for host, since_s in self._reads.values() if now_s - since_s > _READ_S + _LOST_S]
        for host, arrival in arrived:
            report: HostReport = self._value(arrival, host)
            self._done[host] = report.is_done
            yield host, report
        if late:
            raise self._lost(late[0], f"no answer for {_LOST_S:g} s")

    @property
    def are_done(self) -> bool:
        return all(self._done)

    def signal(self, number: int) -> None:
        for actor in self._actors:
            actor.signal.remote(number)

    def end(self, grace_s: float) -> None:
        for actor in self._actors:
            actor.end.remote(grace_s)

    def write_stdin(self, data: bytes, within_s: float) -> Optional[bool]:
        """Write bytes (b"": end of file) to the stdin of instance 0.

        Returns:
            True when written, False if its stdin is closed, None if the write is still pending: call again with the
            same bytes.
        """
        ref = self._stdin = self._stdin or self._actors[0].write_stdin.remote(data)
        ready, _ = self._ray.wait([ref], timeout=within_s)
        if not ready:
            return None
        self._stdin = None
        try:
            return bool(self._ray.get(ref))
        except self._ray.exceptions.RayError:
            return False  # the host is lost; `reports` raises HostLost

    def kill(self) -> None:
        """Kill the actors; the programs end with them."""
        actors, self._actors = self._actors, []
        if self._ray is not None and self._ray.is_initialized():
            for actor in actors:
                self._ray.kill(actor)

    def close(self) -> None:
        """Kill the actors, remove the placement group and close the session."""
        try:
            self.kill()
            if self._reservation is not None and self._ray.is_initialized():
                self._reservation.release(self._ray)
        finally:
            self._reservation, self._ray = None, None
            self._session.close()

    def _call(self, method: str, arguments: Sequence[Tuple[Any, ...]], actors: Optional[List[Any]] = None) -> List[Any]:
        """Call a method of every host in parallel, each with its own arguments; return the results."""
        actors = self._actors if actors is None else actors
        refs = [getattr(actor, method).remote(*each) for actor, each in zip(actors, arguments)]
        pending = {ref: host for host, ref in enumerate(refs)}
        results: Dict[int, Any] = {}
        self._pauses.poll()
        deadline_s = time.monotonic() + self._timeout_s
        while pending:
            for arrival in take_ready(self._ray, pending, _SIGNAL_S):
                host = pending.pop(arrival.ref)
                results[host] = self._value(arrival, host)
            deadline_s += self._pauses.poll()
            if pending and time.monotonic() > deadline_s:
                missing = ", ".join(self._placement.hosts[host].name for host in pending.values())
                raise WaitTimedOut(f"{method} on {missing}", self._timeout_s, _SETTING)
        return [results[host] for host in range(len(refs))]

    def _value(self, arrival: Arrival, host: int) -> Any:
        """Return the value that arrived from a host, or raise its error."""
        error = arrival.error
        if error is None:
            return arrival.value
        if not isinstance(error, self._ray.exceptions.RayTaskError):
            raise self._lost(host, " ".join(death_reason(str(error)).split()))
        cause = getattr(error, "cause", None)
        if isinstance(cause, RaypodError):
            raise cause
        text = f"{type(cause).__name__}: {cause}" if cause is not None else str(error).strip().splitlines()[-1]
        raise RunError(f"host {self._placement.hosts[host].name}: {text}") from error

    def _lost(self, host: int, cause: str) -> HostLost:
        instances = tuple(spec.index for spec in self._placement.instances_on(host))
        return HostLost(self._placement.hosts[host].name, instances, cause, self._logs)
