"""Wait for the results of instances under Ray, detect a dead, silent or stuck one, and find the cause.

A watch owns all outstanding work of its instances: the streams of a segment, and the requests that are made meanwhile.
A wait ends when nothing is outstanding, or raises FleetBroken (the lost instances in `losses`) or the error of an
instance, after everything that the instances have sent is yielded. `RayFleet.repair` replaces lost instances.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

from raypod.errors import CollectiveBroken, DeviceFailed, PeerLost, RaypodError, WaitTimedOut, summarize_exception
from raypod.events import FailureKind, HeartbeatReport, InstanceLost
from raypod.plan import user_code
from raypod.plan.plan import Plan
from raypod.runtime.workers.fleet import Beat, FleetBroken
from raypod.runtime.workers.liveness import (
    LastHeartbeat,
    Suspect,
    find_suspects,
    find_unreleased,
    heartbeat_of,
    is_training,
)
from raypod.runtime.workers.ray_replace import ProcessKiller
from raypod.runtime.workers.ray_wait import NO_VALUE, PauseDetector, death_causes, take_ready
from raypod.system import activity_record

_POLL_INTERVAL_S = 0.2  # also the longest delay of a stop request
_HEARTBEAT_INTERVAL_S = 1.0
_OBSERVE_AFTER = 1 / 3  # share of `run.silent_after_s` without a heartbeat after which the record is read
_STACK_S = 2.0  # timeout for the stack trace of a stuck instance
_BROKEN_POLL_INTERVAL_S = 0.05
_ABORT_INTERVAL_S = 1.0
_CONSEQUENCES = (CollectiveBroken, PeerLost)  # errors that the failure of another instance causes


@dataclasses.dataclass(eq=False)
class Requests:
    """Requests to some instances that were sent together, and their results so far, by instance."""

    timeout: WaitTimedOut
    sent_s: float
    deadline_s: float
    waiting: Set[int]
    results: Dict[int, Any] = dataclasses.field(default_factory=dict)

    @property
    def are_done(self) -> bool:
        """Whether all instances have responded."""
        return not self.waiting

    @property
    def age_s(self) -> float:
        """The seconds since the requests were sent."""
        return time.monotonic() - self.sent_s


@dataclasses.dataclass(frozen=True)
class _Task:
    """Outstanding work of an instance: one of `requests`, or a stream."""

    instance: int
    requests: Optional[Requests] = None


class Watch:
    """Monitors one generation of actors, which are in instance order."""

    def __init__(self, ray: Any, plan: Plan, actors: List[Any], hosts: List[str], killer: ProcessKiller) -> None:
        self._ray, self._plan, self._bounds, self._killer = ray, plan, plan.config.run, killer
        self._actors, self._hosts = actors, hosts
        now_s = time.monotonic()
        self._heartbeats = {index: LastHeartbeat(None, now_s) for index in range(len(actors))}
        self._beats: Dict[Any, int] = {}  # pending heartbeat requests: ref -> instance
        self._observations: Dict[Any, int] = {}  # pending requests of the record of an instance that does not answer
        self._unresponsive: Set[int] = set()  # instances whose last heartbeat was read from their record
        self._requested_s = self._checked_s = now_s
        self._pauses = PauseDetector()
        self._outstanding: Dict[Any, _Task] = {}
        self._aborts: Dict[int, Requests] = {}  # the last one of each instance

    def use_defaults_of(self, device: str) -> None:
        """Use the timeouts of a device, "ipu" or "emulated"."""
        self._bounds = self._bounds.on_device(device)

    def record_heartbeats(self, reports: Dict[int, Optional[HeartbeatReport]]) -> None:
        """Record heartbeats. From its first report on, an instance can be silent."""
        now_s = time.monotonic()
        self._heartbeats.update({index: LastHeartbeat(report, now_s) for index, report in reports.items()})

    def beats(self) -> Dict[int, Beat]:
        """Return the last heartbeat of each instance that has sent one; callable from any thread."""
        latest = dict(self._heartbeats)
        return {index: Beat(each.report, each.received_s) for index, each in latest.items() if each.report is not None}

    def add_streams(self, streams: Dict[Any, int]) -> None:
        """Add streams, whose items `follow` yields. `streams` maps them to their instances."""
        self._outstanding.update({ref: _Task(index) for ref, index in streams.items()})

    def add_requests(self, refs: Dict[Any, int], what: str, bound: Tuple[float, str]) -> Requests:
        """Add requests; return the object that receives their results while `follow` runs.

        `bound` is a timeout in seconds and the setting it is from; the instances that exceed it are lost.
        """
        timeout_s, setting = bound
        now_s = time.monotonic()
        requests = Requests(WaitTimedOut(what, timeout_s, setting), now_s, now_s + timeout_s, set(refs.values()))
        self._outstanding.update({ref: _Task(index, requests) for ref, index in refs.items()})
        return requests

    def results(self, refs: Dict[Any, int], what: str, bound: Tuple[float, str]) -> Dict[int, Any]:
        """Return the results of requests (see `add_requests`) by instance, once all outstanding requests are done.

        Raises:
            FleetBroken: instances were lost; its `results` are those that have arrived.
            RaypodError: an instance raised it.
        """
        assert all(task.requests for task in self._outstanding.values()), "the caller of follow reads the streams"
        requests = self.add_requests(refs, what, bound)
        try:
            for _ in self.follow():
                pass
        except FleetBroken as broken:
            broken.results.update(requests.results)
            raise
        return requests.results

    def follow(self) -> Iterator[Tuple[Optional[int], Any]]:
        """Yield (instance, item) for every item of a stream as it arrives, and (None, None) in between.

        Ends when nothing is outstanding. The caller may add requests whenever it gets (None, None).

        Raises:
            FleetBroken: instances were lost; all items that arrived before have been yielded.
            RaypodError: an instance raised it.
        """
        while self._outstanding:
            errors: Dict[int, Exception] = {}
            yield from self._take(_POLL_INTERVAL_S, errors)
            suspects: List[Suspect] = []
            if not errors and self._is_check_due():
                suspects = find_suspects(self._heartbeats, time.monotonic(), self._bounds) or self._overdue(True)
            if errors or suspects:
                yield from self._end(errors, suspects)
            yield None, None

    def _take(self, within_s: float, errors: Dict[int, Exception]) -> Iterator[Tuple[int, Any]]:
        """Yield the items of streams that arrive within a time; record results, and errors by instance in `errors`."""
        items = []
        for ref, value, error, is_finished in take_ready(self._ray, self._outstanding, within_s):
            task = self._outstanding[ref]
            if is_finished:
                del self._outstanding[ref]
            if error is not None:
                if task.instance not in errors or not _is_cause(errors[task.instance]):
                    errors[task.instance] = error
            elif task.requests is not None:
                task.requests.results[task.instance] = value
                task.requests.waiting.discard(task.instance)
            elif value is not NO_VALUE:
                items.append((task.instance, value))
        self._skip_pause()
        yield from items

    def _skip_pause(self) -> None:
        """Do not count the time in which this process was stopped or busy: replies that arrived then are not read."""
        paused_s = self._pauses.poll()
        if paused_s:
            now_s = time.monotonic()
            self._heartbeats = {
                index: dataclasses.replace(each, received_s=min(now_s, each.received_s + paused_s))
                for index, each in self._heartbeats.items()
            }
            for requests in {task.requests for task in self._outstanding.values()}:
                if requests is not None:
                    requests.deadline_s += min(paused_s, requests.age_s)

    def _is_check_due(self) -> bool:
        """Return whether the instances must be checked; if so, take their heartbeats, and request the next ones."""
        now_s = time.monotonic()
        if now_s - self._checked_s < _POLL_INTERVAL_S:
            return False
        self._checked_s = now_s
        for ref, report, error, _ in take_ready(self._ray, self._beats, 0):
            index = self._beats.pop(ref)
            if error is None:
                self._heartbeats[index] = self._heartbeats[index].next(self._without_pauses(report), now_s)
                self._unresponsive.discard(index)
        self._observe_silent(now_s)
        if now_s - self._requested_s >= _HEARTBEAT_INTERVAL_S:
            self._requested_s = now_s
            without_request = set(range(len(self._actors))) - set(self._beats.values())
            self._beats.update({self._actors[index].beat.remote(): index for index in sorted(without_request)})
        return True

    def _observe_silent(self, now_s: float) -> None:
        """Read the records of instances that do not answer: their SDK may hold the interpreter lock.

        The record of one that is stopped, or of a host that is unreachable, is not found.
        """
        for ref, activity, error, _ in take_ready(self._ray, self._observations, 0):
            index = self._observations.pop(ref)
            if error is None and activity is not None:
                report = self._without_pauses(heartbeat_of(index, activity))
                self._heartbeats[index] = self._heartbeats[index].next(report, now_s)
                self._unresponsive.add(index)
        for index, last in self._heartbeats.items():
            silent_s = now_s - last.received_s
            is_silent = last.report is not None and silent_s > _OBSERVE_AFTER * self._bounds.silent_after_s
            if is_silent and index not in self._observations.values():
                ref = self._killer.on_its_host(activity_record.read, self._actors[index])
                if ref is not None:
                    self._observations[ref] = index

    def _without_pauses(self, report: Optional[HeartbeatReport]) -> Optional[HeartbeatReport]:
        """Return a report whose activity does not include the pauses: the instance may have been stopped, too."""
        if report is None:
            return None
        duration_s = report.duration_s - self._pauses.within(report.duration_s, time.monotonic())
        return dataclasses.replace(report, duration_s=duration_s)

    def _overdue(self, are_complete: bool = False) -> List[Suspect]:
        """Return the instances that exceed the timeout of a request.

        A call that cannot be interrupted has its own timeout, and the instance answers after it; if the instances
        `are_complete`, so has the request that an instance works on, such as an evaluation.
        """
        now_s = time.monotonic()
        working = {index for index in self._unresponsive if is_training(self._heartbeats[index].report)}
        overdue = {}
        for task in self._outstanding.values():
            if task.requests is not None and now_s > task.requests.deadline_s:
                overdue[task.instance] = Suspect(task.instance, "stuck", str(task.requests.timeout))
            elif task.requests is not None and are_complete and task.instance in self._unresponsive:
                working.add(task.instance)
        return [overdue[index] for index in sorted(set(overdue) - working)]

    def _end(self, errors: Dict[int, Exception], suspects: List[Suspect]) -> Iterator[Tuple[int, Any]]:
        """Yield what still arrives while the survivors end their calls, and raise the cause.

        No request outlives this: in a repaired fleet it would pause or abort the wrong segment.
        """
        have_lost_connections = self._all_wait_for_each_other(suspects)
        losses = [] if have_lost_connections else [self._lose(each) for each in suspects]
        late: List[InstanceLost] = []
        # The death of an instance can be reported later than the errors that it causes in others.
        began_s = time.monotonic()
        aborted_s: Optional[float] = None
        while self._outstanding or aborted_s is None:
            now_s = time.monotonic()
            is_clear = losses or any(map(_is_cause, errors.values())) or not self._outstanding
            if aborted_s is None and (is_clear or now_s - began_s >= self._bounds.dead_after_s):
                aborted_s = now_s
            if aborted_s is not None:
                self._abort_collectives({loss.instance for loss in (*losses, *late)})
            yield from self._take(_BROKEN_POLL_INTERVAL_S, errors)
            if aborted_s is not None and self._is_check_due():
                instances, now_s = {task.instance for task in self._outstanding.values()}, time.monotonic()
                counted_since_s = aborted_s + self._pauses.within(now_s - aborted_s, now_s)
                unreleased = find_unreleased(self._heartbeats, instances, counted_since_s, now_s, self._bounds)
                late += [self._lose(each) for each in unreleased or self._overdue()]
        raise self._cause(losses, errors, late, suspects[0].cause if have_lost_connections else "")

    def _abort_collectives(self, lost: Set[int]) -> None:
        """Abort the collectives of all survivors, which also detects further dead ones; repeat if they do not end.

        An instance can start another collective after the aborted one. One that is being built has none, and its
        result is not needed.
        """
        building = {index for index, each in self._heartbeats.items() if each.report is None}
        self._forget(building)
        busy = {task.instance for task in self._outstanding.values()}
        timeout_s = self._bounds.silent_after_s + self._bounds.stop_timeout_s
        for index in set(self._heartbeats) - building - lost:
            before = self._aborts.get(index)
            if before is None or (index in busy and before.are_done and before.age_s >= _ABORT_INTERVAL_S):
                refs = {self._actors[index].abort_collectives.remote(): index}
                self._aborts[index] = self.add_requests(refs, "an abort", (timeout_s, "run.stop_timeout_s"))

    def _forget(self, instances: Set[int]) -> None:
        """Wait for nothing more from these instances."""
        self._outstanding = {ref: task for ref, task in self._outstanding.items() if task.instance not in instances}

    def _lose(self, suspect: Suspect) -> InstanceLost:
        """Kill a suspect, and wait for nothing more from it."""
        self._forget({suspect.instance})
        loss = self._kill_suspect(suspect)
        self._pauses.poll()  # the wait for its stack is no pause
        return loss

    def _all_wait_for_each_other(self, suspects: List[Suspect]) -> bool:
        are_built = all(each.report is not None for each in self._heartbeats.values())
        are_all = len(suspects) == len(self._actors) > 1
        return are_built and are_all and all(suspect.kind == "stuck" for suspect in suspects)

    def _kill_suspect(self, suspect: Suspect) -> InstanceLost:
        """Kill the process of a suspect; get its stack trace before if it is stuck."""
        actor, stack = self._actors[suspect.instance], ""
        if suspect.kind == "stuck":
            is_unresponsive = suspect.instance in self._unresponsive
            ref = self._killer.on_its_host(activity_record.stacks, actor) if is_unresponsive else actor.stack.remote()
            arrived = take_ready(self._ray, [] if ref is None else [ref], _STACK_S)
            stack = "".join(each.value for each in arrived if each.error is None)
        self._killer.kill_frozen(actor)
        return self._loss(suspect.instance, suspect.kind, suspect.cause, stack)

    def _cause(
        self, losses: List[InstanceLost], errors: Dict[int, Exception], late: List[InstanceLost], connections: str
    ) -> RaypodError:
        """Return the error to raise.

        `late` are survivors that could not continue; `connections` is why all have lost their connections, or "".
        """
        died = {
            index: str(error)
            for index, error in errors.items()
            if isinstance(error, self._ray.exceptions.RayActorError)
        }
        died = death_causes(self._ray, self._plan, died)
        losses = losses + [self._loss(index, "died", cause) for index, cause in died.items()]
        causes = {index: getattr(error, "cause", None) for index, error in errors.items() if index not in died}
        raypod_errors = [
            cause
            for cause in causes.values()
            if isinstance(cause, RaypodError) and not isinstance(cause, _CONSEQUENCES)
        ]
        if raypod_errors and not losses:
            return raypod_errors[0]
        for index, cause in causes.items():
            if not isinstance(cause, RaypodError):
                text = str(errors[index]).splitlines()[-1]
                if cause is not None:
                    text = f"{summarize_exception(cause)}{user_code.place_of(cause)}"
                losses.append(self._loss(index, "raised", text))
        for index, cause in causes.items():
            if isinstance(cause, DeviceFailed):
                loss = self._loss(index, "device", str(cause))
                losses.append(dataclasses.replace(loss, recovery_action=cause.recovery_action))
        consequences = "; ".join(str(cause) for cause in causes.values() if cause is not None)
        return FleetBroken((*losses, *late), connections or consequences)

    def _loss(self, index: int, kind: FailureKind, cause: str, stack: str = "") -> InstanceLost:
        report = self._heartbeats[index].report
        activity = report.activity if report is not None else ""
        cause = " ".join(cause.split())
        return InstanceLost(index, self._hosts[index], kind, cause, activity, stack, self._plan.log_file(index))


def _is_cause(error: Exception) -> bool:
    """Return whether an error of Ray is not the consequence of another instance's failure."""
    return not isinstance(getattr(error, "cause", None), _CONSEQUENCES)
