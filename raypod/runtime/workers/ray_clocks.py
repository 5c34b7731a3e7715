"""Compare the clocks of the instances' hosts with this one's, by requests whose sending and arrival are measured here.

A host's clock was read between the two times, so that their middle is wrong by at most half their distance.
"""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List, Optional, Sequence

from raypod.events import ClockReading

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
