"""Instances under Ray: one placement group with a bundle per host, one actor per instance, in host order.

The only place (with ray_session.py) that knows Ray. Every error of Ray becomes one of raypod's own here.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from raypod.errors import InstanceFailed, RaypodError, WaitTimedOut
from raypod.events import CallReport, InstanceStarted
from raypod.fleet.process import InstanceProcess
from raypod.fleet.ray_nodes import await_hosts
from raypod.fleet.ray_session import RaySession, Reservation, reason_of_death, reserve
from raypod.plan import Leg, Plan

_LOOK_EVERY_S = 0.2  # how long a stop request may go unnoticed
_BLAME_S = 2.0  # how long to look for the death behind the broken collective of a survivor


class RayFleet:
    """A fleet of actors (see `Fleet`)."""

    def __init__(self, plan: Plan, tell: Callable[[str], None] = lambda line: None) -> None:
        """`tell` gets a line for people about whatever keeps the start waiting."""
        self._plan, self._bounds, self._tell = plan, plan.config.run, tell
        self._session = RaySession(plan.placement, plan.config.pod.cluster, preload="torch")
        self._ray: Any = None
        self._reservation: Optional[Reservation] = None
        self._actors: List[Any] = []
        self._at_rest = False  # all instances answer, and none is inside a leg
        self.start_seconds: List[Tuple[str, float]] = []

    def start(self) -> List[InstanceStarted]:
        """Session, placement group, actors, SDK, rendezvous."""
        began = time.monotonic()
        self._ray = self._session.open()
        began = self._clock("start or join Ray", began)
        nodes = await_hosts(self._ray, self._plan.placement, self._plan.config.pod.wait_hosts, self._tell)
        began = self._clock("wait for hosts", began)
        bound = (self._bounds.start_timeout_s, "run.start_timeout_s")
        self._reservation = reserve(self._ray, self._plan.placement, nodes, bound)
        self._start_actors(self._reservation)
        started = self._get([actor.build.remote() for actor in self._actors], "the instances to start")
        began = self._clock("start the instances", began)
        self._meet(nodes)
        self._clock("meet", began)
        self._at_rest = True
        return list(started)

    def call(self, method: str, *arguments: Any) -> List[Any]:
        """See `Fleet.call`."""
        self._at_rest = False
        refs = [actor.call.remote(method, *arguments) for actor in self._actors]
        what = f"{method} of all instances"
        results = self._get(refs, what, self._bounds.report_timeout_s, "run.report_timeout_s")
        self._at_rest = True
        return results

    def _call_now(self, method: str, *arguments: Any) -> List[Any]:
        """Call a method beside the leg that is running."""
        refs = [actor.call_now.remote(method, *arguments) for actor in self._actors]
        return self._get(refs, f"{method} of all instances", self._bounds.stop_timeout_s, "run.stop_timeout_s")

    def run(self, leg: Leg, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        """See `Fleet.run`."""
        streams = {
            actor.run.options(num_returns="streaming").remote(leg): index for index, actor in enumerate(self._actors)
        }
        heard_s = time.monotonic()
        stopping = False
        self._at_rest = False
        while streams:
            if stop_requested() and not stopping:
                stopping = True
                self._call_now("stop_after", max(self._call_now("pause")))
            ready, _ = self._ray.wait(list(streams), timeout=_LOOK_EVERY_S)
            if not ready:
                if time.monotonic() - heard_s > self._bounds.report_timeout_s:
                    raise WaitTimedOut(
                        "a report of any instance", self._bounds.report_timeout_s, "run.report_timeout_s"
                    )
                continue
            heard_s = time.monotonic()
            for stream in ready:
                reports = self._next(stream, streams)
                if reports is None:
                    del streams[stream]
                else:
                    yield from reports
        if stopping:
            self._call_now("reopen")
        self._at_rest = True

    def close(self) -> None:
        """See `Fleet.close`."""
        try:
            if self._ray is not None and self._ray.is_initialized():
                self._end_actors()
        finally:
            self._actors, self._reservation, self._ray = [], None, None
            self._session.close()

    # ---- starting --------------------------------------------------------------------------------------------------

    def _start_actors(self, reservation: Reservation) -> None:
        actor_class = self._ray.remote(InstanceProcess)
        for spec in self._plan.instances:
            options = reservation.options(spec.host_index, len(self._plan.instances_on(spec.host_index)))
            options["max_concurrency"] = 2  # so that `pause` is heard while a leg runs
            self._actors.append(actor_class.options(**options).remote(self._plan, spec.index, str(Path.cwd())))

    def _meet(self, nodes: List[Dict[str, Any]]) -> None:
        where: Dict[str, str] = {}
        if len(self._actors) > 1:
            hosts = [node["NodeManagerAddress"] for node in nodes]
            if self._plan.cluster.data_network is not None:
                asked = [actor.call.remote("data_address") for actor in self._actors]
                hosts = self._get(asked, "the addresses in the data network")
            opened = self._actors[0].call.remote("open_rendezvous", hosts[0], hosts)
            where = self._get([opened], "the first instance to open the rendezvous")[0]
        self._get([actor.call.remote("join", where) for actor in self._actors], "the instances to meet")

    def _clock(self, what: str, began: float) -> float:
        now = time.monotonic()
        self.start_seconds.append((what, now - began))
        return now

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def _get(
        self, refs: List[Any], what: str, timeout_s: Optional[float] = None, setting: str = "run.start_timeout_s"
    ) -> List[Any]:
        """The values of `refs` (one per instance), within a bound; the first failure ends the wait."""
        bound = timeout_s or self._bounds.start_timeout_s
        deadline = time.monotonic() + bound
        pending = {ref: index for index, ref in enumerate(refs)}
        while pending:
            ready, _ = self._ray.wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                waiting = ", ".join(str(index) for index in pending.values())
                raise WaitTimedOut(f"{what} (still waiting for instance {waiting})", bound, setting)
            done = [(pending.pop(ref), self._look(ref)[1]) for ref in ready]
            failures = [(index, error) for index, error in done if error is not None]
            if failures:
                raise self._blame(failures, pending)
        return list(self._ray.get(refs))

    def _next(self, stream: Any, streams: Dict[Any, int]) -> Optional[List[CallReport]]:
        """The next reports of a stream; None at its end."""
        try:
            reports: List[CallReport] = self._ray.get(next(stream))
        except StopIteration:
            return None
        except self._ray.exceptions.RayError as error:
            index = streams.pop(stream)
            raise self._blame([(index, error)], streams) from None
        return reports

    def _look(self, ref: Any) -> Tuple[bool, Optional[Exception]]:
        """Whether a result that is ready, or a stream whose next item is, has ended; and with which error."""
        is_stream = hasattr(ref, "__next__")
        try:
            self._ray.get(next(ref) if is_stream else ref)
        except StopIteration:
            return True, None
        except self._ray.exceptions.RayError as error:
            return True, error
        return not is_stream, None

    # ---- failing ---------------------------------------------------------------------------------------------------

    def _blame(self, failures: List[Tuple[int, Exception]], others: Dict[Any, int]) -> RaypodError:
        """The first cause: a dead process before the survivors whose collective it broke."""
        self._at_rest = False
        deadline = time.monotonic() + _BLAME_S
        others = dict(others)
        while others and not any(self._is_death(error) for _, error in failures) and time.monotonic() < deadline:
            ready, _ = self._ray.wait(list(others), timeout=max(0.0, deadline - time.monotonic()))
            for ref in ready:
                ended, error = self._look(ref)
                if error is not None:
                    failures.append((others[ref], error))
                if ended:
                    del others[ref]
        failures.sort(key=lambda failure: not self._is_death(failure[1]))  # stable: else the earliest
        index, error = failures[0]
        return self._told(index, error)

    def _is_death(self, error: Exception) -> bool:
        return isinstance(error, self._ray.exceptions.RayActorError)

    def _told(self, index: int, error: Exception) -> RaypodError:
        cause = getattr(error, "cause", None)
        if isinstance(cause, RaypodError):
            return cause
        if self._is_death(error):
            text = reason_of_death(str(error))
        else:
            text = f"{type(cause).__name__}: {cause}" if cause is not None else str(error).strip().splitlines()[-1]
        spec = self._plan.instances[index]
        return InstanceFailed(index, spec.host, " ".join(text.split()), self._plan.log_file(index))

    def _end_actors(self) -> None:
        if self._at_rest:
            self._leave()
        for actor in self._actors:
            self._ray.kill(actor)
        if self._reservation is not None:
            self._ray.util.remove_placement_group(self._reservation.group)

    def _leave(self) -> None:
        """Let healthy instances end what they started; those that do not answer in time are killed after it."""
        refs = [actor.call.remote("close") for actor in self._actors]
        if refs:
            self._ray.wait(refs, num_returns=len(refs), timeout=self._bounds.stop_timeout_s)
