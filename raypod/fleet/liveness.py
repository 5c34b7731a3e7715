"""Who is stuck or silent: a pure judgement of what the instances last said, within stated bounds.

A process that ends is noticed by its connection, at once. Silence has bounds of its own: a frozen process or a host
that is cut off (`run.silent_after_s`), and an instance that answers and does not get on (`run.stuck_after_s`).
"""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Optional

from typing_extensions import Literal

from raypod.events import Beat
from raypod.instance.control import LOADING
from raypod.plan.config import RunSection

SLOWER_THAN_EVER = 3.0  # times the slowest call so far


@dataclasses.dataclass(frozen=True)
class Heard:
    """The last beat of an instance, and when it was heard, by the fleet's clock.

    None before the first: what starts an instance, and builds it, has a bound of its own.
    """

    beat: Optional[Beat]
    at_s: float


@dataclasses.dataclass(frozen=True)
class Trouble:
    """An instance to be given up, and why in words."""

    instance: int
    kind: Literal["silent", "stuck"]
    cause: str


def judge(heard: Dict[int, Heard], now_s: float, bounds: RunSection) -> List[Trouble]:
    """The instances that are the cause if nothing gets on; none while all is well.

    Of those that wait for each other too long, the cause is whoever does not wait; else whoever has done the fewest
    calls. If all have done the same and all wait, nobody is to blame: one Trouble for each, and the wires are renewed.
    """
    silent = [
        Trouble(index, "silent", _silence(each.beat, now_s - each.at_s, bounds))
        for index, each in sorted(heard.items())
        if each.beat is not None and now_s - each.at_s > bounds.silent_after_s
    ]
    if silent:
        return silent
    beats = [each.beat for _, each in sorted(heard.items()) if each.beat is not None and _works(each.beat)]
    bound_s = _bound(beats, bounds)
    late = [beat for beat in beats if beat.for_s > bound_s]
    if not late:
        return []
    busy = [beat for beat in beats if not beat.waits_for_others]
    if busy:
        late = [beat for beat in late if not beat.waits_for_others]  # none yet: the cause reaches its own bound soon
    else:
        fewest = min(beat.calls for beat in beats)
        late = [beat for beat in late if beat.calls == fewest]
    return [Trouble(beat.instance, "stuck", _stuck(beat, bound_s, beats, bounds)) for beat in late]


def _works(beat: Beat) -> bool:
    """Whether it does what every call does. Everything else (saving, evaluating) has a bound of its own."""
    return beat.doing == LOADING or beat.doing.startswith("in call")


def _bound(beats: List[Beat], bounds: RunSection) -> float:
    slowest = [beat.slowest_call_s for beat in beats]
    if not slowest or None in slowest:  # somebody compiles
        return max(bounds.report_timeout_s, bounds.stuck_after_s)
    return max(bounds.stuck_after_s, SLOWER_THAN_EVER * max(each for each in slowest if each is not None))


def _silence(last: Beat, for_s: float, bounds: RunSection) -> str:
    return (
        f"silent for {for_s:.1f} s (run.silent_after_s = {bounds.silent_after_s:g}): its process is frozen, or its "
        f"host cut off; when last heard it was {last.doing}"
    )


def _stuck(beat: Beat, bound_s: float, beats: List[Beat], bounds: RunSection) -> str:
    if bound_s == bounds.stuck_after_s:
        told = f"run.stuck_after_s = {bound_s:g}"
    elif any(each.slowest_call_s is None for each in beats):
        told = f"run.report_timeout_s = {bound_s:g} bounds a first call"
    else:
        told = f"{SLOWER_THAN_EVER:g} times the slowest call so far, {bound_s:.1f} s"
    return f"stuck: {beat.doing} for {beat.for_s:.1f} s ({told})"
