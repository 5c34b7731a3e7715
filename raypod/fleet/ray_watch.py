"""Wait for the results of instances under Ray, monitor their heartbeats, and find the cause if one fails.

A wait returns results, or raises FleetBroken (the lost instances in `losses`) or the error of an instance.
`RayFleet.repair` replaces lost instances.
"""

from __future__ import annotations

import time
from typing import Any, Dict, Iterator, List, Optional, Tuple

from raypod.errors import CollectiveBroken, PeerLost, RaypodError, WaitTimedOut
from raypod.events import FailureKind, HeartbeatReport, InstanceLost
from raypod.fleet.base import FleetBroken
from raypod.fleet.liveness import LastHeartbeat, Suspect, find_suspects
from raypod.fleet.ray_replace import ProcessKiller
from raypod.fleet.ray_session import death_reason
from raypod.plan.plan import Plan

_POLL_INTERVAL_S = 0.2  # also the longest delay of a stop request
_HEARTBEAT_INTERVAL_S = 1.0
_PAUSE_S = 2.0  # longer intervals between two polls are pauses of this process
_STACK_S = 2.0  # timeout for the stack trace of a stuck instance
_BROKEN_POLL_INTERVAL_S = 0.05
_ABORT_INTERVAL_S = 1.0
_CONSEQUENCES = (CollectiveBroken, PeerLost)  # errors that the failure of another instance causes
_NO_VALUE = object()


class Watch:
    """Monitors one generation of actors, which are in instance order."""

    def __init__(self, ray: Any, plan: Plan, actors: List[Any], hosts: List[str], killer: ProcessKiller) -> None:
        self._ray, self._plan, self._bounds, self._killer = ray, plan, plan.config.run, killer
        self._actors, self._hosts = actors, hosts
        now_s = time.monotonic()
        self._heartbeats = {index: LastHeartbeat(None, now_s) for index in range(len(actors))}
        self._requests: Dict[Any, int] = {}  # pending heartbeat requests: ref -> instance
        self._requested_s = self._polled_s = now_s

    def record_heartbeats(self, reports: Dict[int, Optional[HeartbeatReport]]) -> None:
        """Record heartbeats. From its first report on, an instance can be silent."""
        now_s = time.monotonic()
        self._heartbeats.update({index: LastHeartbeat(report, now_s) for index, report in reports.items()})

    def heartbeats(self) -> Dict[int, Optional[HeartbeatReport]]:
        """Return the last heartbeat of each instance."""
        return {index: each.report for index, each in self._heartbeats.items()}

    def results(self, refs: Dict[Any, int], what: str, bound: Tuple[float, str]) -> Dict[int, Any]:
        """Return the values of `refs` by instance. `bound` is a timeout in seconds and the setting it is from.

        Raises:
            FleetBroken: instances were lost, or are not done within the timeout.
            RaypodError: an instance raised it.
        """
        values = {}
        timeout_s, setting = bound
        deadline = time.monotonic() + timeout_s
        waiting = set(refs.values())
        for index, value in self.follow(refs):
            if index is not None:
                values[index] = value
                waiting.discard(index)
            if waiting and time.monotonic() > deadline:
                self._raise_timeout(sorted(waiting), WaitTimedOut(what, timeout_s, setting))
        return values

    def follow(self, tasks: Dict[Any, int]) -> Iterator[Tuple[Optional[int], Any]]:
        """Yield (instance, value) for every result and every item of a stream as it arrives; (None, None) in between.

        Raises:
            FleetBroken: instances were lost; everything that arrived before has been yielded.
            RaypodError: an instance raised it.
        """
        pending = dict(tasks)
        while pending:
            for index, value, error in self._arrivals(pending, _POLL_INTERVAL_S):
                if error is not None:
                    yield from self._raise_cause({index: error}, [], pending)
                elif value is not _NO_VALUE:
                    yield index, value
            suspects = self._find_suspects()
            if suspects:
                yield from self._raise_cause({}, suspects, pending)
            yield None, None

    def _arrivals(self, pending: Dict[Any, int], within_s: float) -> Iterator[Tuple[int, Any, Optional[Exception]]]:
        """Yield (instance, value, error) of what arrives within a time; remove finished tasks from `pending`."""
        ready, _ = self._ray.wait(list(pending), timeout=within_s)
        for ref in ready:
            index = pending[ref]
            value, is_finished, error = self._get_result(ref)
            if is_finished:
                del pending[ref]
            yield index, value, error

    def _find_suspects(self) -> List[Suspect]:
        """Request a heartbeat from every instance once per second, and evaluate the replies."""
        now_s = time.monotonic()
        if now_s - self._polled_s > _PAUSE_S:
            # This process was stopped or busy, so missing replies do not mean that the instances are silent.
            self.record_heartbeats(self.heartbeats())
        self._polled_s = now_s
        if self._requests:
            ready, _ = self._ray.wait(list(self._requests), num_returns=len(self._requests), timeout=0)
            for ref in ready:
                index = self._requests.pop(ref)
                report, _, error = self._get_result(ref)
                if error is None:
                    self._heartbeats[index] = LastHeartbeat(report, now_s)
        if now_s - self._requested_s >= _HEARTBEAT_INTERVAL_S:
            self._requested_s = now_s
            without_request = set(range(len(self._actors))) - set(self._requests.values())
            self._requests.update({self._actors[index].beat.remote(): index for index in sorted(without_request)})
        return find_suspects(self._heartbeats, now_s, self._bounds)

    def _raise_cause(
        self, errors: Dict[int, Exception], suspects: List[Suspect], pending: Dict[Any, int]
    ) -> Iterator[Tuple[Optional[int], Any]]:
        """Yield what still arrives, abort the collectives of the survivors, and raise the cause."""
        losses = [] if self._all_wait_for_each_other(suspects) else [self._kill_suspect(each) for each in suspects]
        lost = {loss.instance for loss in losses}
        pending = {ref: index for ref, index in pending.items() if index not in lost}
        # The death of an instance can be reported later than the errors that it causes in others.
        cause_deadline = time.monotonic() + self._bounds.dead_after_s
        abort_deadline: Optional[float] = None
        aborted_s, aborts = 0.0, []
        while pending:
            now_s = time.monotonic()
            if abort_deadline is None and (now_s >= cause_deadline or losses or any(map(_is_cause, errors.values()))):
                abort_deadline = now_s + self._bounds.stop_timeout_s
            if abort_deadline is not None and now_s >= abort_deadline:
                break
            if abort_deadline is not None and now_s - aborted_s >= _ABORT_INTERVAL_S:
                # Repeatedly: an instance can start another collective after the aborted one.
                aborted_s = now_s
                aborts += [self._actors[index].abort_collectives.remote() for index in set(pending.values())]
            for index, value, error in self._arrivals(pending, _BROKEN_POLL_INTERVAL_S):
                if error is not None:
                    errors[index] = error
                elif value is not _NO_VALUE:
                    yield index, value
        if aborts:  # so that a late abort does not end a later collective
            self._ray.wait(aborts, num_returns=len(aborts), timeout=_ABORT_INTERVAL_S)
        raise self._cause(losses, errors, sorted(set(pending.values())))

    def _raise_timeout(self, late: List[int], timeout: WaitTimedOut) -> None:
        """Raise FleetBroken for the instances that are not done within a timeout."""
        for _ in self._raise_cause({}, [Suspect(index, "stuck", str(timeout)) for index in late], {}):
            pass  # without pending tasks it yields nothing before it raises

    def _all_wait_for_each_other(self, suspects: List[Suspect]) -> bool:
        return len(suspects) == len(self._actors) > 1 and all(suspect.kind == "stuck" for suspect in suspects)

    def _kill_suspect(self, suspect: Suspect) -> InstanceLost:
        """Kill the process of a suspect; get its stack trace before if it is stuck."""
        actor, stack = self._actors[suspect.instance], ""
        if suspect.kind == "stuck":
            ref = actor.stack.remote()
            ready, _ = self._ray.wait([ref], timeout=_STACK_S)
            value, _, error = self._get_result(ref) if ready else ("", True, None)
            stack = value if error is None else ""
        self._killer.kill_frozen(actor)
        return self._loss(suspect.instance, suspect.kind, suspect.cause, stack)

    def _cause(self, losses: List[InstanceLost], errors: Dict[int, Exception], late: List[int]) -> RaypodError:
        """Return the error to raise. `late` are instances whose collectives could not be aborted in time."""
        died = {
            index: error for index, error in errors.items() if isinstance(error, self._ray.exceptions.RayActorError)
        }
        losses = losses + [self._loss(index, "died", death_reason(str(error))) for index, error in died.items()]
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
                text = summarize_exception(cause) if cause is not None else str(errors[index]).splitlines()[-1]
                losses.append(self._loss(index, "raised", text))
        bound_s = self._bounds.stop_timeout_s
        text = f"did not abort its collectives with the lost instances within {bound_s:g} s (run.stop_timeout_s)"
        losses += [self._kill_suspect(Suspect(index, "stuck", text)) for index in late]
        return FleetBroken(tuple(losses), "; ".join(str(cause) for cause in causes.values() if cause is not None))

    def _loss(self, index: int, kind: FailureKind, cause: str, stack: str = "") -> InstanceLost:
        report = self._heartbeats[index].report
        activity = report.activity if report is not None else ""
        cause = " ".join(cause.split())
        return InstanceLost(index, self._hosts[index], kind, cause, activity, stack, self._plan.log_file(index))

    def _get_result(self, ref: Any) -> Tuple[Any, bool, Optional[Exception]]:
        """Return (value, whether the task is finished, error) of a ready result, or of a stream with a ready item."""
        is_stream = hasattr(ref, "__next__")
        try:
            return self._ray.get(next(ref) if is_stream else ref), not is_stream, None
        except StopIteration:
            return _NO_VALUE, True, None
        except self._ray.exceptions.RayError as error:
            return _NO_VALUE, True, error


def _is_cause(error: Exception) -> bool:
    """Return whether an error of Ray is not the consequence of another instance's failure."""
    return not isinstance(getattr(error, "cause", None), _CONSEQUENCES)


def summarize_exception(cause: BaseException) -> str:
    """Return an exception in one line. The message of a data loader worker's exception is its whole traceback."""
    text = f"{type(cause).__name__}: {cause}"
    head, is_of_worker, traceback = text.partition("Original Traceback (most recent call last)")
    if not is_of_worker:
        return text
    where = head.rpartition(" in ")[2].strip().rstrip(".")
    return f"{traceback.strip().splitlines()[-1]} (in {where})"
