"""Instances under Ray: one placement group with a bundle per host, one actor per instance, in host order.

The only place (with ray_session.py) that knows Ray. Every error of Ray becomes one of raypod's own here.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from raypod.events import Beat, CallReport, InstanceStarted
from raypod.fleet.base import FleetBroken, failure_of
from raypod.fleet.ray_nodes import Reservation, await_hosts, draining_hosts, host_name, reserve
from raypod.fleet.ray_replace import Killer, Substitutes
from raypod.fleet.ray_session import RaySession
from raypod.fleet.ray_watch import Watch
from raypod.instance.control import IDLE
from raypod.instance.process import InstanceProcess
from raypod.plan.plan import Leg, Plan

_DEAF_AFTER_S = 2.0  # in a hurry: at an end that waits for nothing
_DRAINS_EVERY_S = 2.0  # how long a host that is taken away may go unnoticed


class RayFleet:
    """A fleet of actors (see `Fleet`)."""

    def __init__(self, plan: Plan, tell: Callable[[str], None] = lambda line: None) -> None:
        """`tell` gets a line for people about whatever keeps the start waiting."""
        self._plan, self._bounds, self._tell = plan, plan.config.run, tell
        self._session = RaySession(plan.placement, plan.config.pod.cluster, preload="torch")
        self._ray: Any = None
        self._killer: Optional[Killer] = None
        self._reservation: Optional[Reservation] = None
        self._actors: List[Any] = []
        self._nodes: List[Dict[str, Any]] = []  # of Ray, on which each actor lives
        self._watch: Optional[Watch] = None
        self._generation = 0
        self._draining: List[str] = []
        self._drains_asked_s = 0.0
        self._at_rest = False  # all instances answer, and none is inside a leg
        self.start_seconds: List[Tuple[str, float]] = []

    def start(self) -> List[InstanceStarted]:
        """Session, placement group, actors, SDK, rendezvous."""
        began = time.monotonic()
        self._ray = self._session.open()
        self._killer = Killer(self._ray)
        began = self._clock("start or join Ray", began)
        nodes = await_hosts(self._ray, self._plan.placement, self._plan.config.pod.wait_hosts, self._tell)
        began = self._clock("wait for hosts", began)
        bound = (self._bounds.start_timeout_s, "run.start_timeout_s")
        self._reservation = reserve(self._ray, self._plan.placement, nodes, bound)
        for spec in self._plan.instances:
            share = len(self._plan.instances_on(spec.host_index))
            node, options = nodes[spec.host_index], self._reservation.options(spec.host_index, share)
            self._actors.append(self._actor(spec.index, node, options))
            self._nodes.append(node)
        self._watch = Watch(self._ray, self._plan, self._actors, self.hosts(), self._killer)
        try:
            started: List[InstanceStarted] = self._all("the instances to start", bound, "build")
            began = self._clock("start the instances", began)
            self._meet(0)
        except FleetBroken as broken:  # what does not even start is not repaired
            raise failure_of(broken.losses[0]) if broken.losses else broken from None
        self._clock("meet", began)
        return started

    def call(self, method: str, *arguments: Any) -> List[Any]:
        """See `Fleet.call`."""
        bound = (self._bounds.report_timeout_s, "run.report_timeout_s")
        return self._all(f"{method} of all instances", bound, "call", method, *arguments)

    def run(self, leg: Leg, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        """See `Fleet.run`."""
        assert self._watch is not None, "start comes first"
        streams = {
            actor.run.options(num_returns="streaming").remote(leg): index for index, actor in enumerate(self._actors)
        }
        stopping = False
        self._at_rest = False
        for index, reports in self._watch.follow(streams):
            if index is not None:
                yield from reports
            elif stop_requested() and not stopping:
                stopping = True
                self._call_now("stop_after", max(self._call_now("pause")))
        if stopping:
            self._call_now("reopen")
        self._at_rest = True

    def repair(self, lost: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        """See `Fleet.repair`."""
        assert self._killer is not None, "start comes first"
        self._at_rest = False
        self._drains_asked_s = 0.0
        self._generation += 1
        for index in lost:
            self._killer.kill(self._actors[index])
        known = self._watch.beats() if self._watch is not None else {}
        for index, place in self._substitutes().place(lost, self._nodes, may_share_hosts, self._actor).items():
            self._actors[index], self._nodes[index] = place.actor, place.node
        self._watch = Watch(self._ray, self._plan, self._actors, self.hosts(), self._killer)
        self._watch.take_beats({index: _at_rest(beat) for index, beat in known.items() if index not in lost})
        bound = (self._bounds.start_timeout_s, "run.start_timeout_s")
        building = {self._actors[index].build.remote(): index for index in lost}
        survivors = [index for index in range(len(self._actors)) if index not in lost]
        leaving = {self._actors[index].call.remote("leave"): index for index in survivors}
        positions = self._watch.results(leaving, "the survivors to part", bound)
        self._watch.results(building, "the replacements to start", bound)
        self._meet(survivors[0] if survivors else 0)
        self._at_rest = True
        return positions

    def draining(self) -> List[str]:
        """See `Fleet.draining`."""
        if time.monotonic() - self._drains_asked_s > _DRAINS_EVERY_S:
            self._drains_asked_s = time.monotonic()
            self._draining = draining_hosts(self._ray, self._plan.placement, self._nodes)
        return self._draining

    def has_room_for(self, instances: Tuple[int, ...], may_share_hosts: bool) -> bool:
        """See `Fleet.has_room_for`."""
        return self._substitutes().has_room_for(instances, self._nodes, may_share_hosts)

    def hosts(self) -> List[str]:
        """See `Fleet.hosts`."""
        return [host_name(self._plan.placement, node) for node in self._nodes]

    def close(self) -> None:
        """See `Fleet.close`."""
        try:
            if self._ray is not None and self._ray.is_initialized():
                self._end_actors()
        finally:
            self._actors, self._reservation, self._ray = [], None, None
            self._session.close()

    def _substitutes(self) -> Substitutes:
        assert self._reservation is not None, "start comes first"
        assert self._killer is not None, "start comes first"
        return Substitutes(self._ray, self._plan, self._reservation, self._killer)

    # ---- starting --------------------------------------------------------------------------------------------------

    def _actor(self, index: int, node: Dict[str, Any], options: Dict[str, Any]) -> Any:
        """Start the actor of an instance on a Ray node, where `options` say."""
        assert self._killer is not None, "start comes first"
        concurrency = {"max_concurrency": 8}  # so that beats and `pause` are heard while a leg runs
        actor_class = self._ray.remote(InstanceProcess)
        actor = actor_class.options(**options, **concurrency).remote(self._plan, index, str(Path.cwd()))
        self._killer.know(actor, node)
        return actor

    def _meet(self, root: int) -> None:
        """Let all instances meet at a point that instance `root` opens."""
        assert self._watch is not None, "start comes first"
        where: Dict[str, str] = {}
        bound = (self._bounds.start_timeout_s, "run.start_timeout_s")
        if len(self._actors) > 1:
            hosts = [node["NodeManagerAddress"] for node in self._nodes]
            if self._plan.cluster.data_network is not None:
                hosts = self._all("the addresses in the data network", bound, "call", "data_address")
            opened = self._actors[root].call.remote("open_rendezvous", hosts[root], self._generation)
            where = self._watch.results({opened: root}, "an instance to open the rendezvous", bound)[root]
        self._all("the instances to meet", bound, "call", "join", where)
        # Before the first beat nobody is called silent; from here on everybody may be.
        self._watch.take_beats(dict(enumerate(self._all("the first beats", bound, "beat"))))

    def _all(self, what: str, bound: Tuple[float, str], verb: str, *arguments: Any) -> List[Any]:
        """The results of all actors' `verb`, in instance order."""
        assert self._watch is not None, "start comes first"
        self._at_rest = False
        refs = {getattr(actor, verb).remote(*arguments): index for index, actor in enumerate(self._actors)}
        results = self._watch.results(refs, what, bound)
        self._at_rest = True
        return [results[index] for index in range(len(self._actors))]

    def _call_now(self, method: str, *arguments: Any) -> List[Any]:
        """Call a method beside the leg that is running."""
        bound = (self._bounds.stop_timeout_s, "run.stop_timeout_s")
        results = self._all(f"{method} of all instances", bound, "call_now", method, *arguments)
        self._at_rest = False
        return results

    def _clock(self, what: str, began: float) -> float:
        now = time.monotonic()
        self.start_seconds.append((what, now - began))
        return now

    def _end_actors(self) -> None:
        assert self._killer is not None, "start comes first"
        frozen = self._leave() if self._at_rest else self._deaf()
        for actor in self._actors:
            if actor in frozen:
                self._killer.kill_frozen(actor)
            else:
                self._killer.kill(actor)
        self._killer.close()
        if self._reservation is not None:
            self._ray.util.remove_placement_group(self._reservation.group)

    def _deaf(self) -> List[Any]:
        """The actors that do not even say what they are doing."""
        refs = {actor.beat.remote(): actor for actor in self._actors}
        if not refs:
            return []
        _, late = self._ray.wait(list(refs), num_returns=len(refs), timeout=_DEAF_AFTER_S)
        return [refs[ref] for ref in late]

    def _leave(self) -> List[Any]:
        """Let healthy instances end what they started; the actors that do not answer in time."""
        refs = {actor.call.remote("close"): actor for actor in self._actors}
        if not refs:
            return []
        _, late = self._ray.wait(list(refs), num_returns=len(refs), timeout=self._bounds.stop_timeout_s)
        return [refs[ref] for ref in late]


def _at_rest(beat: Optional[Beat]) -> Optional[Beat]:
    """What is known of a survivor while others are replaced: it lives, and what it waited for is over."""
    return dataclasses.replace(beat, doing=IDLE, for_s=0.0, waits_for_others=False) if beat is not None else None
