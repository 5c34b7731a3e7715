"""Waiting for instances under Ray: for all at once, looking after them meanwhile, and finding the cause when one fails.

Nothing here repairs; it ends in results, or in a FleetBroken that names who has to be given up, first cause first.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Dict, Iterator, List, Optional, Tuple

from typing_extensions import Literal

from raypod.errors import CollectiveBroken, PeerLost, RaypodError, WaitTimedOut
from raypod.events import Beat, InstanceLost
from raypod.fleet.base import FleetBroken
from raypod.fleet.liveness import Heard, Trouble, judge
from raypod.fleet.ray_replace import Killer
from raypod.fleet.ray_session import reason_of_death
from raypod.plan.plan import Plan

Kind = Literal["died", "raised", "silent", "stuck"]

LOOK_EVERY_S = 0.2  # how long a stop request may go unnoticed
_BEAT_EVERY_S = 1.0
_NO_LOOK_S = 2.0
_STACK_S = 2.0  # how long to wait for the stack of an instance that is given up
_BREAK_LOOK_S = 0.05
_FREE_EVERY_S = 1.0
_ECHOES = (CollectiveBroken, PeerLost)
_NONE = object()


class Watch:
    """Of one generation of actors, in instance order."""

    def __init__(self, ray: Any, plan: Plan, actors: List[Any], hosts: List[str], killer: Killer) -> None:
        self._ray, self._plan, self._bounds, self._killer = ray, plan, plan.config.run, killer
        self._actors, self._hosts = actors, hosts
        now_s = time.monotonic()
        self._heard = {index: Heard(None, now_s) for index in range(len(actors))}
        self._asked: Dict[Any, int] = {}
        self._asked_s = self._looked_s = now_s

    def take_beats(self, beats: Dict[int, Optional[Beat]]) -> None:
        """Instances have told what they do: from now on their silence counts."""
        now_s = time.monotonic()
        self._heard.update({index: Heard(beat, now_s) for index, beat in beats.items()})

    def beats(self) -> Dict[int, Optional[Beat]]:
        """What each instance was heard to do last."""
        return {index: each.beat for index, each in self._heard.items()}

    def results(self, refs: Dict[Any, int], what: str, bound: Tuple[float, str]) -> Dict[int, Any]:
        """The values of `refs` by instance; `bound` is how long to wait in seconds, and what sets it.

        Raises:
            FleetBroken: instances were lost, or are not done within the bound.
            RaypodError: what an instance raised on purpose.
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
                told = str(WaitTimedOut(what, timeout_s, setting))
                troubles = [Trouble(late, "stuck", told) for late in sorted(waiting)]
                deque(self._break({}, troubles, {}), maxlen=0)
        return values

    def follow(self, tasks: Dict[Any, int]) -> Iterator[Tuple[Optional[int], Any]]:
        """(instance, value) of every result, and of every item of a stream, as they come; (None, None) in between.

        Raises:
            FleetBroken: instances were lost; what all had yielded until then has been yielded here.
            RaypodError: what an instance raised on purpose.
        """
        pending = dict(tasks)
        while pending:
            for index, value, error in self._arrivals(pending, LOOK_EVERY_S):
                if error is not None:
                    yield from self._break({index: error}, [], pending)
                elif value is not _NONE:
                    yield index, value
            troubles = self._troubles()
            if troubles:
                yield from self._break({}, troubles, pending)
            yield None, None

    def _arrivals(self, pending: Dict[Any, int], within_s: float) -> Iterator[Tuple[int, Any, Optional[Exception]]]:
        """(instance, value, error) of what arrives within a time; tasks that have ended are taken out of `pending`."""
        ready, _ = self._ray.wait(list(pending), timeout=within_s)
        for ref in ready:
            index = pending[ref]
            value, ended, error = self._take(ref)
            if ended:
                del pending[ref]
            yield index, value, error

    # ---- looking after them ----------------------------------------------------------------------------------------

    def _troubles(self) -> List[Trouble]:
        """Ask every instance once a second what it is doing, and judge the answers."""
        now_s = time.monotonic()
        if now_s - self._looked_s > _NO_LOOK_S:
            # Nobody has listened here meanwhile (this process was stopped, or did something else): no sign of silence.
            self._heard = {index: Heard(each.beat, now_s) for index, each in self._heard.items()}
        self._looked_s = now_s
        if self._asked:
            answered, _ = self._ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
            for ref in answered:
                index = self._asked.pop(ref)
                value, _, error = self._take(ref)
                if error is None:
                    self._heard[index] = Heard(value, now_s)
        if now_s - self._asked_s >= _BEAT_EVERY_S:
            self._asked_s = now_s
            missing = set(range(len(self._actors))) - set(self._asked.values())
            self._asked.update({self._actors[index].beat.remote(): index for index in sorted(missing)})
        return judge(self._heard, now_s, self._bounds)

    # ---- finding the cause -----------------------------------------------------------------------------------------

    def _break(
        self, errors: Dict[int, Exception], troubles: List[Trouble], pending: Dict[Any, int]
    ) -> Iterator[Tuple[Optional[int], Any]]:
        """Hear what the others still have to say, free them from waiting for the lost, and raise what has happened."""
        losses = [] if self._wait_for_each_other(troubles) else [self._give_up(trouble) for trouble in troubles]
        lost = {loss.instance for loss in losses}
        pending = {ref: index for ref, index in pending.items() if index not in lost}
        patient_until_s = time.monotonic() + self._bounds.dead_after_s  # a death may be told later than what it broke
        freed_until_s: Optional[float] = None
        freed_s, freeing = 0.0, []
        while pending:
            now_s = time.monotonic()
            if freed_until_s is None and (now_s >= patient_until_s or losses or any(map(_is_a_cause, errors.values()))):
                freed_until_s = now_s + self._bounds.stop_timeout_s
            if freed_until_s is not None and now_s >= freed_until_s:
                break
            if freed_until_s is not None and now_s - freed_s >= _FREE_EVERY_S:
                # Again and again: who is freed from one wait may begin another one for the lost.
                freed_s = now_s
                freeing += [self._actors[index].abandon.remote() for index in set(pending.values())]
            for index, value, error in self._arrivals(pending, _BREAK_LOOK_S):
                if error is not None:
                    errors[index] = error
                elif value is not _NONE:
                    yield index, value
        if freeing:  # none is to come late, into what follows
            self._ray.wait(freeing, num_returns=len(freeing), timeout=_FREE_EVERY_S)
        raise self._verdict(losses, errors, sorted(set(pending.values())))

    def _wait_for_each_other(self, troubles: List[Trouble]) -> bool:
        return len(troubles) == len(self._actors) > 1 and all(trouble.kind == "stuck" for trouble in troubles)

    def _give_up(self, trouble: Trouble) -> InstanceLost:
        """End the process of an instance that does not get on, after a look at where it is."""
        actor, stack = self._actors[trouble.instance], ""
        if trouble.kind == "stuck":
            ref = actor.stack.remote()
            ready, _ = self._ray.wait([ref], timeout=_STACK_S)
            value, _, error = self._take(ref) if ready else ("", True, None)
            stack = value if error is None else ""
        self._killer.kill_frozen(actor)
        return self._loss(trouble.instance, trouble.kind, trouble.cause, stack)

    def _verdict(self, losses: List[InstanceLost], errors: Dict[int, Exception], late: List[int]) -> RaypodError:
        died = {
            index: error for index, error in errors.items() if isinstance(error, self._ray.exceptions.RayActorError)
        }
        losses = losses + [self._loss(index, "died", reason_of_death(str(error))) for index, error in died.items()]
        causes = {index: getattr(error, "cause", None) for index, error in errors.items() if index not in died}
        on_purpose = [
            cause for cause in causes.values() if isinstance(cause, RaypodError) and not isinstance(cause, _ECHOES)
        ]
        if on_purpose and not losses:
            return on_purpose[0]
        for index, cause in causes.items():
            if not isinstance(cause, RaypodError):
                text = in_short(cause) if cause is not None else str(errors[index]).splitlines()[-1]
                losses.append(self._loss(index, "raised", text))
        bound_s = self._bounds.stop_timeout_s
        told = f"did not let go of the lost instances within {bound_s:g} s (run.stop_timeout_s)"
        losses += [self._give_up(Trouble(index, "stuck", told)) for index in late]
        return FleetBroken(tuple(losses), "; ".join(str(cause) for cause in causes.values() if cause is not None))

    def _loss(self, index: int, kind: Kind, cause: str, stack: str = "") -> InstanceLost:
        beat = self._heard[index].beat
        doing = beat.doing if beat is not None else ""
        cause = " ".join(cause.split())
        return InstanceLost(index, self._hosts[index], kind, cause, doing, stack, self._plan.log_file(index))

    def _take(self, ref: Any) -> Tuple[Any, bool, Optional[Exception]]:
        """(value, whether that was all, error) of a result that is ready, or of a stream whose next item is."""
        is_stream = hasattr(ref, "__next__")
        try:
            return self._ray.get(next(ref) if is_stream else ref), not is_stream, None
        except StopIteration:
            return _NONE, True, None
        except self._ray.exceptions.RayError as error:
            return _NONE, True, error


def _is_a_cause(error: Exception) -> bool:
    """Whether an error of Ray's is more than an echo of another instance's."""
    return not isinstance(getattr(error, "cause", None), _ECHOES)


def in_short(cause: BaseException) -> str:
    """An exception in one line. What a process of a data loader raised has its whole traceback for a message."""
    text = f"{type(cause).__name__}: {cause}"
    head, of_a_worker, traceback = text.partition("Original Traceback (most recent call last)")
    if not of_a_worker:
        return text
    where = head.rpartition(" in ")[2].strip().rstrip(".")
    return f"{traceback.strip().splitlines()[-1]} (in {where})"
