"""A fleet under Ray: one placement group with a bundle per host, one actor per instance, in host order.

The modules `runtime/workers/ray*` are the only ones of training that call Ray; they convert its errors to raypod's.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from raypod.events import CallReport, ClockReading, EvaluationReport, InstanceStarted
from raypod.plan.cluster import Cluster
from raypod.plan.elastic import Room
from raypod.plan.plan import Plan, Segment
from raypod.runtime.worker.control import IDLE
from raypod.runtime.worker.process import InstanceProcess
from raypod.runtime.workers.fleet import Beat, Family, FleetBroken, Labels, failure_of
from raypod.runtime.workers.ray_nodes import (
    draining_hosts,
    host_name,
    match_hosts,
    nodes_of,
    peers_of,
    read_clocks,
    wait_for_nodes,
)
from raypod.runtime.workers.ray_replace import ProcessKiller, Replacements, Standbys
from raypod.runtime.workers.ray_reservation import HostRoom, Reservation, node_affinity, reserve
from raypod.runtime.workers.ray_session import RaySession
from raypod.runtime.workers.ray_wait import death_reason
from raypod.runtime.workers.ray_watch import Requests, Watch
from raypod.system.command_line import counted
from raypod.system.process import StepTimer
from raypod.training.checkpoint.resume import way_to_continue

_UNRESPONSIVE_S = 2.0  # ping timeout on abnormal shutdown
_DRAINING_INTERVAL_S = 2.0  # between two requests of the draining nodes


class RayFleet:
    """Runs each instance in a Ray actor. See `ElasticFleet` for the methods."""

    def __init__(self, plan: Plan, log: Callable[[str], None] = lambda line: None) -> None:
        """`log` receives a line for the user while `start` waits for hosts."""
        self._plan, self._bounds, self._log = plan, plan.config.run, log
        self._full = plan  # that of `resize` can be a smaller one
        self._start_bound = (self._bounds.start_timeout_s, "run.start_timeout_s")
        # An instance that responds handles a request during a segment at once. One that does not is silent before this.
        self._segment_bound = (self._bounds.silent_after_s + self._bounds.stop_timeout_s, "run.stop_timeout_s")
        hint = functools.partial(way_to_continue, plan.run_dir)
        self._session = RaySession(
            plan.placement,
            plan.config.pod.cluster,
            has_template=True,
            start_bound=self._start_bound,
            hint=hint,
            without_ray="--fleet inline --num-instances 1, which needs no Ray",
        )
        self._ray: Any = None
        self._reservation: Optional[Reservation] = None
        self._reserved_nodes: List[Dict[str, Any]] = []  # of the hosts of the plan
        self._standbys: Optional[Standbys] = None
        self._actors: List[Any] = []
        self._nodes: List[Dict[str, Any]] = []  # the Ray node of each actor
        self._watch: Optional[Watch] = None
        self._started: List[InstanceStarted] = []
        self._building: Dict[Any, int] = {}  # the replacements that an interrupted repair has left to start
        self._servers: List[RayServer] = []
        self._exported: Optional[Tuple[Callable[[], Iterable[Family]], Labels]] = None
        self._metrics: Optional[RayMetrics] = None
        self._generation = 0
        self._draining: List[str] = []
        self._draining_s = 0.0
        self._abandons_loading = False
        self.must_leave: Callable[[], bool] = lambda: False
        self._is_idle = False  # all instances respond, and none runs a segment
        self._timer = StepTimer()
        self.start_seconds = self._timer.steps

    def start(self) -> List[InstanceStarted]:
        self._timer.begin()
        ray = self._session.open(self._log)
        self._killer = ProcessKiller(ray)
        self._ray = ray  # last: `close` uses both
        self._timer.end("start or join Ray")
        placement = self._plan.placement
        nodes = wait_for_nodes(self._ray, placement, self._plan.config.pod.wait_hosts, self._log)
        self._timer.end("wait for hosts")
        try:
            self._start_instances(nodes)
        except FleetBroken as broken:  # a failed start is not repaired
            raise failure_of(broken.losses[0]) if broken.losses else broken from None
        if self._exported is not None:
            metrics = importlib.import_module("ray.util.metrics")
            self._metrics = RayMetrics(metrics, *self._exported, self._log)
        return self._started

    def call(self, method: str, *arguments: Any) -> List[Any]:
        bound = (self._bounds.report_timeout_s, "run.report_timeout_s")
        return self._all(f"{method} of all instances", bound, "call", method, *arguments)

    def run(self, segment: Segment, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        streams = {
            actor.run.options(num_returns="streaming").remote(segment): index
            for index, actor in enumerate(self._actors)
        }
        self._is_idle = False
        self._live_watch.add_streams(streams)
        pause: Optional[Requests] = None
        stop: Optional[Requests] = None
        for index, reports in self._live_watch.follow():
            if index is not None:
                yield from reports
            elif pause is None:
                pause = self._request_now("pause") if stop_requested() else None
            elif pause.are_done and stop is None:
                stop = self._request_now("stop_after", max(pause.results.values()))
            elif stop is not None and stop.are_done and self._abandons_loading:
                self._abandons_loading = False
                self._request_now("end_loading")
        if pause is not None:
            self._all("reopen of all instances", self._segment_bound, "call_now", "reopen")
        self._is_idle = True

    def abandon_loading(self) -> None:
        self._abandons_loading = True

    def evaluate(self, is_abandoned: Callable[[], bool]) -> Optional[List[EvaluationReport]]:
        self._is_idle = False
        refs = {actor.call.remote("evaluate"): index for index, actor in enumerate(self._actors)}
        bound = (self._bounds.report_timeout_s, "run.report_timeout_s")
        evaluated = self._live_watch.add_requests(refs, "evaluate of all instances", bound)
        abandoned: Optional[Requests] = None
        for _ in self._live_watch.follow():
            if abandoned is None and is_abandoned():
                abandoned = self._request_now("abandon_evaluation")
        self._is_idle = True
        return [evaluated.results[index] for index in range(len(self._actors))] if abandoned is None else None

    def repair(self, lost: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        self._is_idle = False
        self._draining_s = 0.0
        self._generation += 1
        for index in lost:
            self._killer.kill(self._actors[index])
        replacements = self._replacements().start(lost, self._nodes, may_share_hosts, self._replacement)
        for index, replacement in replacements.items():
            self._actors[index], self._nodes[index] = replacement.actor, replacement.node
        survivors = [index for index in range(len(self._actors)) if index not in lost]
        self._watch = self._new_watch(survivors)
        building = {ref: index for ref, index in self._building.items() if index in survivors}
        building.update({self._actors[index].build.remote(): index for index in lost})
        leaving = {self._actors[index].call.remote("leave"): index for index in survivors}
        built = self._watch.add_requests(building, "the replacements to start", self._start_bound)
        try:
            positions = self._watch.results(leaving, "the survivors to close their connections", self._start_bound)
        finally:  # a replacement that is ready stays if the next attempt replaces others
            self._started = [built.results.get(index, before) for index, before in enumerate(self._started)]
            self._building = {ref: index for ref, index in building.items() if index not in built.results}
        self._rendezvous(survivors[0] if survivors else 0)
        assert self._standbys is not None, "start comes first"
        self._standbys.fill(self._reserved_nodes)
        self._is_idle = True
        return positions

    def release(self, survivors: Sequence[int]) -> Dict[int, int]:
        self._is_idle = False
        self._watch = self._new_watch(survivors)
        return self.call_on(survivors, "leave")

    def call_on(self, instances: Sequence[int], method: str, *arguments: Any) -> Dict[int, Any]:
        refs = {self._actors[index].call.remote(method, *arguments): index for index in instances}
        bound = (self._bounds.report_timeout_s, "run.report_timeout_s")
        return self._live_watch.results(refs, f"{method} of {counted(len(refs), 'instance')}", bound)

    def room(self) -> List[Room]:
        return HostRoom(self._ray, self._full, self._log).alive()

    def wait_for_room(self, is_enough: Callable[[List[Room]], bool], stop_requested: Callable[[], bool]) -> List[Room]:
        return HostRoom(self._ray, self._full, self._log).wait(is_enough, stop_requested)

    def resize(self, plan: Plan) -> List[InstanceStarted]:
        self._end_instances()
        self._plan, self._actors, self._nodes, self._started, self._building = plan, [], [], [], {}
        self._draining_s = 0.0
        self._generation += 1
        self._start_instances(match_hosts(self._ray, plan.placement))
        return self._started

    def draining(self) -> List[str]:
        if time.monotonic() - self._draining_s > _DRAINING_INTERVAL_S:
            self._draining_s = time.monotonic()
            self._draining = draining_hosts(self._plan.placement, self._nodes)
        return self._draining

    def has_room_for(self, instances: Tuple[int, ...], may_share_hosts: bool) -> bool:
        return self._replacements().has_room_for(instances, self._nodes, may_share_hosts)

    def hosts(self) -> List[str]:
        return [host_name(self._plan.placement, node) for node in self._nodes]

    def started(self) -> List[InstanceStarted]:
        # An instance knows only the host of the plan, also where it replaces another one elsewhere.
        return [dataclasses.replace(each, host=host) for each, host in zip(self._started, self.hosts())]

    def heartbeats(self) -> Dict[int, Beat]:
        return self._watch.beats() if self._watch is not None else {}

    def export_metrics(self, collect: Callable[[], Iterable[Family]], constant: Labels) -> None:
        self._exported = (collect, constant)

    def clocks(self) -> Dict[int, ClockReading]:
        return read_clocks(self._ray, self._actors, [str(node["NodeID"]) for node in self._nodes])

    def serve(self, kind: Callable[..., Any], *arguments: Any) -> RayServer:
        self._servers.append(serve_here(self._ray, kind, *arguments))
        return self._servers[-1]

    def peers(self) -> List[str]:
        return peers_of(self._ray, self._full.placement.cluster)

    def serve_on(self, host: str, kind: Callable[..., Any], *arguments: Any) -> RayServer:
        return serve_on(self._ray, self._full.placement.cluster, host, kind, *arguments)

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        try:
            if self._ray is not None and self._ray.is_initialized():
                self._end_instances()
                for server in self._servers:
                    server.close()
                self._killer.close()
        finally:
            self._actors, self._reservation, self._ray = [], None, None
            self._session.close()

    def _start_instances(self, nodes: List[Dict[str, Any]]) -> None:
        """Start the actors of the plan on the nodes of its hosts, and form their process group."""
        placement = self._plan.placement
        self._reservation = reserve(self._ray, placement, nodes, self._start_bound)
        self._reserved_nodes = nodes
        for spec in placement.instances:
            share = len(placement.instances_on(spec.host_index))
            node, options = nodes[spec.host_index], self._reservation.options(spec.host_index, share)
            self._actors.append(self._start_actor(spec.index, node, options))
            self._nodes.append(node)
        self._watch = Watch(self._ray, self._plan, self._actors, self.hosts(), self._killer)
        self._started = self._all("the instances to start", self._start_bound, "build")
        self._watch.use_defaults_of(self._started[0].device)
        self._timer.end("start the instances")
        self._rendezvous(0)
        self._timer.end("meet")
        self._standbys = Standbys(self._ray, self._plan, self._start_actor, self._killer.kill_frozen, self._log)
        self._standbys.fill(nodes)

    @property
    def _live_watch(self) -> Watch:
        assert self._watch is not None, "start comes first"
        return self._watch

    def _new_watch(self, survivors: Sequence[int]) -> Watch:
        """Return a watch of the current actors, in which only the survivors can be silent."""
        # A survivor waits for nothing any more.
        idle = {
            index: dataclasses.replace(beat.report, activity=IDLE, duration_s=0.0, waits_for_others=False)
            for index, beat in self.heartbeats().items()
        }
        watch = Watch(self._ray, self._plan, self._actors, self.hosts(), self._killer)
        watch.use_defaults_of(self._started[0].device)
        watch.record_heartbeats({index: idle.get(index) for index in survivors})
        return watch

    def _replacements(self) -> Replacements:
        assert self._reservation is not None, "start comes first"
        return Replacements(self._ray, self._plan, self._reservation, self._killer, self.must_leave)

    def _replacement(self, index: int, node: Dict[str, Any], options: Dict[str, Any]) -> Any:
        """Return a standby, or start an actor, for a lost instance."""
        assert self._standbys is not None, "start comes first"
        return self._standbys.take(index, node) or self._start_actor(index, node, options)

    def _start_actor(self, index: Optional[int], node: Dict[str, Any], options: Dict[str, Any]) -> Any:
        """Start the actor of an instance, or of a standby (None); `options` place it on the Ray node `node`."""
        concurrency = {"max_concurrency": 8}  # so that heartbeats and `pause` are handled during a segment
        actor_class = self._ray.remote(InstanceProcess)
        actor = actor_class.options(**options, **concurrency).remote(self._plan, index, str(Path.cwd()))
        self._killer.register(actor, node)
        return actor

    def _rendezvous(self, root: int) -> None:
        """Form the process group of all instances through a rendezvous that instance `root` opens."""
        environment: Dict[str, str] = {}
        if len(self._actors) > 1:
            hosts = [node["NodeManagerAddress"] for node in self._nodes]
            if self._plan.placement.cluster.data_network is not None:
                hosts = self._all("the addresses in the data network", self._start_bound, "call", "data_address")
            opened = self._actors[root].call.remote("open_rendezvous", hosts[root], self._generation)
            what = "an instance to open the rendezvous"
            environment = self._live_watch.results({opened: root}, what, self._start_bound)[root]
        self._all("the instances to form the process group", self._start_bound, "call", "join", environment)
        # From its first heartbeat on, an instance can be silent.
        self._live_watch.record_heartbeats(
            dict(enumerate(self._all("the first heartbeats", self._start_bound, "beat")))
        )

    def _all(self, what: str, bound: Tuple[float, str], verb: str, *arguments: Any) -> List[Any]:
        """Return the results of the method `verb` of all actors, in instance order."""
        self._is_idle = False
        refs = {getattr(actor, verb).remote(*arguments): index for index, actor in enumerate(self._actors)}
        results = self._live_watch.results(refs, what, bound)
        self._is_idle = True
        return [results[index] for index in range(len(self._actors))]

    def _request_now(self, method: str, *arguments: Any) -> Requests:
        """Request a call of all instances while a segment runs."""
        refs = {actor.call_now.remote(method, *arguments): index for index, actor in enumerate(self._actors)}
        return self._live_watch.add_requests(refs, f"{method} of all instances", self._segment_bound)

    def _end_instances(self) -> None:
        """End all actors, and the reservation of their hosts."""
        if self._standbys is not None:
            self._standbys.close()
        if self._is_idle:  # let the instances close what they have opened
            requests = {actor.call.remote("close"): actor for actor in self._actors}
            frozen = self._unresponsive(requests, self._bounds.stop_timeout_s)
        else:
            frozen = self._unresponsive({actor.beat.remote(): actor for actor in self._actors}, _UNRESPONSIVE_S)
        for actor in self._actors:
            if actor in frozen:
                self._killer.kill_frozen(actor)
            else:
                self._killer.kill(actor)
        if self._reservation is not None:
            self._reservation.release(self._ray)
            self._reservation = None

    def _unresponsive(self, requests: Dict[Any, Any], timeout_s: float) -> List[Any]:
        """Return the actors that do not reply to their request within a time."""
        if not requests:
            return []
        _, late = self._ray.wait(list(requests), num_returns=len(requests), timeout=timeout_s)
        return [requests[ref] for ref in late]


class RayServer:
    """A `checkpoint.transfer.Server`: an object in an actor. It can be sent to other processes of the Ray session."""

    def __init__(self, actor: Any, host: str) -> None:
        """`host` names the host of the actor in errors."""
        self._actor, self._host = actor, host

    def request(self, method: str, *arguments: Any) -> Any:
        return getattr(self._actor, method).remote(*arguments)

    def result(self, handle: Any, timeout_s: float) -> Any:
        ray = importlib.import_module("ray")
        try:
            return ray.get(handle, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"{self._host} does not respond") from None
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise ConnectionError(f"no connection to {self._host}: {death_reason(str(error))}") from error

    def close(self) -> None:
        importlib.import_module("ray").kill(self._actor)


def serve_here(ray: Any, kind: Callable[..., Any], *arguments: Any) -> RayServer:
    """Start an actor on the node of this process, without waiting for it."""
    node = {"NodeID": ray.get_runtime_context().get_node_id()}
    # If it dies, the checkpoint that it was writing fails, and the next one succeeds.
    options = {**node_affinity(node), "max_restarts": -1}
    return RayServer(ray.remote(kind).options(**options).remote(*arguments), "the coordinator's host")


def serve_on(ray: Any, cluster: Cluster, host: str, kind: Callable[..., Any], *arguments: Any) -> RayServer:
    """Start an actor on the host of a cluster with the name `host`, without waiting for it.

    Raises:
        ConnectionError: the host has no live node.
    """
    (node,) = nodes_of(ray, [each for each in cluster.hosts if each.name == host])
    if not node:
        raise ConnectionError(f"no Ray node is alive on host {host}")
    options = {**node_affinity(node), "max_restarts": 0}
    return RayServer(ray.remote(kind).options(**options).remote(*arguments), f"host {host}")


_METRICS_INTERVAL_S = 5.0  # less than the interval at which Ray's workers report, 10 s
_METRICS_CLOSE_S = 5.0


class RayMetrics:
    """Exports the metrics of a run through `ray.util.metrics`, so that Ray's own exporter and dashboards carry them.

    A thread records all metrics every few seconds, also while nothing happens in the run: Ray's exporter forgets a
    gauge that is not recorded again. The parts of a histogram are gauges, because Ray's Histogram accepts only single
    observations, one per call and instance. Ray exports the metrics with the prefix `ray_`, and only with
    `raypod[pod]`; without it, it discards them.
    """

    def __init__(
        self,
        metrics: Any,
        collect: Callable[[], Iterable[Family]],
        constant: Labels,
        log: Callable[[str], None],
        interval_s: float = _METRICS_INTERVAL_S,
    ) -> None:
        """Start the thread.

        Args:
            metrics: the module `ray.util.metrics`, of a connected Ray.
            collect: returns the current metrics; called in the thread.
            constant: labels that are added to each sample.
            log: receives one line if the export fails; then it ends, and the run goes on.
            interval_s: between two exports.
        """
        self._metrics, self._collect, self._constant, self._log = metrics, collect, dict(constant), log
        self._interval_s = interval_s
        self._made: Dict[str, Any] = {}  # Ray's metrics by name
        self._counted: Dict[Tuple[str, Labels], float] = {}  # the value of each counter that Ray has
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Export the last values and end the thread, within a bound; before Ray's session is closed."""
        self._closing.set()
        self._thread.join(_METRICS_CLOSE_S)

    def _run(self) -> None:
        try:
            is_last = False
            while not is_last:
                is_last = self._closing.wait(self._interval_s)
                for family in self._collect():
                    self._export(family)
        except Exception as error:  # of any version of Ray; the run does not depend on its metrics
            self._log(f"warning: no more metrics through Ray: {type(error).__name__}: {error}")

    def _export(self, family: Family) -> None:
        for labels, value, suffix in family.samples:
            name, tags = family.name + suffix, {**self._constant, **dict(labels)}
            metric = self._made.get(name)
            if metric is None:
                kind = self._metrics.Counter if family.kind == "counter" else self._metrics.Gauge
                metric = self._made[name] = kind(name, family.help, tuple(tags))
            if family.kind != "counter":
                metric.set(float(value), tags)
                continue
            before = self._counted.get((name, labels), 0.0)
            if value > 0 and value != before:  # a counter of a host begins again with its boot
                metric.inc(float(value - before if value > before else value), tags)
                self._counted[name, labels] = value
