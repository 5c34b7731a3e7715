"""The hosts of a launch under Ray: one placement group with a bundle per host, one actor on each.

The only place (with ray_session.py and ray.py) that knows Ray. A host that does not answer in time is lost, whatever
Ray knows of it: every `read` of a living one returns within a bound.
"""

from __future__ import annotations

import time
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from raypod.errors import HostLost, RaypodError, RunError, WaitTimedOut
from raypod.fleet.ray_nodes import Reservation, match_hosts, reserve
from raypod.fleet.ray_session import RaySession, reason_of_death
from raypod.launcher.host_process import HostProcess
from raypod.launcher.records import HostFacts, HostReport, Program
from raypod.plan.placement import Placement

_READ_S = 1.0  # a host answers at least this often
_LOST_S = 10.0  # one that does not is lost
_SETTING = "--start-timeout"


class RayHosts:
    """The hosts of a placement, in its order."""

    def __init__(self, placement: Placement, cluster_file: Optional[str], start_timeout_s: float) -> None:
        self._placement, self._timeout_s, self._logs = placement, start_timeout_s, "none yet"
        self._session = RaySession(placement, cluster_file, preload=HostProcess.__module__)
        self._ray: Any = None
        self._reservation: Optional[Reservation] = None
        self._actors: List[Any] = []
        self._addresses: List[str] = []
        self._reads: Dict[Any, Tuple[int, float]] = {}  # under way: host, since when
        self._stdin: Any = None  # what is being written
        self._done: List[bool] = [False] * len(placement.hosts)
        self.start_seconds: List[Tuple[str, float]] = []

    def join(self) -> None:
        """Join or start Ray, which puts signal handlers of its own in place."""
        began = time.monotonic()
        self._ray = self._session.open()
        self._clock("start or join Ray", began)

    def open(self) -> None:
        """Placement group and actors."""
        began = time.monotonic()
        nodes = match_hosts(self._ray, self._placement)
        self._addresses = [node["NodeManagerAddress"] for node in nodes]
        self._reservation = reserve(self._ray, self._placement, nodes, (self._timeout_s, _SETTING))
        began = self._clock("reserve the hosts", began)
        actor_class = self._ray.remote(HostProcess)
        for index in range(len(nodes)):
            options = {**self._reservation.options(index, 1), "max_concurrency": 4}  # `end` beside a `read`
            self._actors.append(actor_class.options(**options).remote())
        self._call("ready", [() for _ in nodes])
        self._clock("start an actor on every host", began)

    def meet(self, subnet: Optional[str], instances: int) -> List[HostFacts]:
        """Settle addresses, and open the meeting point on the first host if there is anybody to meet."""
        hosts, chosen = self._addresses, [""] * len(self._actors)
        if subnet:
            hosts = chosen = self._call("address_in", [(subnet,) for _ in self._actors])
        if instances == 1:
            return [HostFacts(address, {}) for address in hosts]
        where: Dict[str, str] = self._call("open_rendezvous", [(hosts[0],)], self._actors[:1])[0]
        return self._call("facts", [(where, own) for own in chosen])

    def start(self, programs: Sequence[Sequence[Program]], grace_s: float, logs: str) -> None:
        """Start the programs of every host; `logs` is where their output goes."""
        self._logs = logs
        began = time.monotonic()
        self._call("start", [(tuple(each), grace_s) for each in programs])
        self._clock("start the programs", began)

    def reports(self, within_s: float) -> Iterator[Tuple[int, HostReport]]:
        """What the hosts report within a time; nothing of those that are done.

        Raises:
            HostLost: one is gone, or has not answered in time.
        """
        asked = {host for host, _ in self._reads.values()}
        for host, actor in enumerate(self._actors):
            if host not in asked and not self._done[host]:
                self._reads[actor.read.remote(_READ_S)] = (host, time.monotonic())
        if not self._reads:
            return
        ready, _ = self._ray.wait(list(self._reads), timeout=within_s)
        for ref in ready:
            host, _ = self._reads.pop(ref)
            report: HostReport = self._get(ref, host)
            self._done[host] = report.is_done
            yield host, report
        for host, since in self._reads.values():
            if time.monotonic() - since > _READ_S + _LOST_S:
                raise self._lost(host, f"it has not answered for {_LOST_S:g} s")

    @property
    def are_done(self) -> bool:
        """Whether every host has reported its last."""
        return all(self._done)

    def signal(self, number: int) -> None:
        """Pass a signal on to all programs."""
        for actor in self._actors:
            actor.signal.remote(number)

    def end(self, grace_s: float) -> None:
        """End what is left of the programs, everywhere."""
        for actor in self._actors:
            actor.end.remote(grace_s)

    def write_stdin(self, data: bytes, within_s: float) -> Optional[bool]:
        """Hand bytes (b"": the end) to instance 0; False when it listens no more, None if that takes longer.

        After None, the next call waits for the same bytes.
        """
        ref = self._stdin = self._stdin or self._actors[0].write_stdin.remote(data)
        ready, _ = self._ray.wait([ref], timeout=within_s)
        if not ready:
            return None
        self._stdin = None
        try:
            return bool(self._ray.get(ref))
        except self._ray.exceptions.RayError:
            return False  # the host is lost; `reports` says so

    def close(self) -> None:
        """End actors, placement group and session; what they started ends with them."""
        try:
            if self._ray is not None and self._ray.is_initialized():
                for actor in self._actors:
                    self._ray.kill(actor)
                if self._reservation is not None:
                    self._ray.util.remove_placement_group(self._reservation.group)
        finally:
            self._actors, self._reservation, self._ray = [], None, None
            self._session.close()

    def _call(self, method: str, arguments: Sequence[Tuple[Any, ...]], actors: Optional[List[Any]] = None) -> List[Any]:
        """Call a method of every host, each with its own arguments, at the same time."""
        actors = self._actors if actors is None else actors
        refs = [getattr(actor, method).remote(*each) for actor, each in zip(actors, arguments)]
        deadline = time.monotonic() + self._timeout_s
        pending = list(refs)
        while pending:
            _, pending = self._ray.wait(pending, num_returns=len(pending), timeout=0.2)  # so that Ctrl-C is heard
            if pending and time.monotonic() > deadline:
                missing = ", ".join(self._placement.hosts[refs.index(ref)].name for ref in pending)
                raise WaitTimedOut(f"{method} on {missing}", self._timeout_s, _SETTING)
        return [self._get(ref, host) for host, ref in enumerate(refs)]

    def _get(self, ref: Any, host: int) -> Any:
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, RaypodError):
                raise cause from None
            text = f"{type(cause).__name__}: {cause}" if cause is not None else str(error).strip().splitlines()[-1]
            raise RunError(f"host {self._placement.hosts[host].name}: {text}") from error
        except self._ray.exceptions.RayError as error:
            raise self._lost(host, " ".join(reason_of_death(str(error)).split())) from None

    def _lost(self, host: int, cause: str) -> HostLost:
        instances = tuple(spec.index for spec in self._placement.instances_on(host))
        return HostLost(self._placement.hosts[host].name, instances, cause, self._logs)

    def _clock(self, what: str, began: float) -> float:
        now = time.monotonic()
        self.start_seconds.append((what, now - began))
        return now
