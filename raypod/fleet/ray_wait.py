"""Take everything that Ray has ready at once, and detect pauses of this process. Used by training and by launches."""

from __future__ import annotations

import time
from typing import Any, Iterable, List, NamedTuple, Optional, Sequence

NO_VALUE = object()
_PAUSE_S = 2.0  # longer intervals between two polls are pauses
_MOST_ITEMS = 64  # of a stream at a time, so that a fast one does not delay the caller endlessly


class Arrival(NamedTuple):
    """A result, an item of a stream, or the end of either: one of `value` and `error` is set."""

    ref: Any
    value: Any  # NO_VALUE for the end of a stream, or with an error
    error: Optional[Exception]
    is_finished: bool  # nothing more arrives from `ref`


def take_ready(ray: Any, refs: Iterable[Any], within_s: float) -> List[Arrival]:
    """Return all results and all items of streams that are ready, in order; wait up to `within_s` for the first one.

    `ray.wait` returns as soon as the requested number is ready, and its cost grows with the number of references.
    """
    waiting = list(refs)
    if not waiting or not ray.wait(waiting, timeout=within_s)[0]:
        return []
    arrivals: List[Arrival] = []
    for _ in range(_MOST_ITEMS):
        ready = _ready_of(ray, waiting)
        if not ready:
            break
        arrived = _take(ray, ready)
        arrivals += arrived
        waiting = [each.ref for each in arrived if not each.is_finished]
    return arrivals


def is_stream(ref: Any) -> bool:
    """Return whether a reference yields references."""
    return hasattr(ref, "__next__")


class PauseDetector:
    """Detects that this process did not poll: it was stopped, or blocked by its output. Others cannot be judged by it.

    While the process does not poll, replies wait to be read.
    """

    def __init__(self) -> None:
        self._polled_s = time.monotonic()

    def poll(self) -> float:
        """Return the seconds since the previous poll if that is a pause, else 0.0."""
        now_s = time.monotonic()
        elapsed_s, self._polled_s = now_s - self._polled_s, now_s
        return elapsed_s if elapsed_s > _PAUSE_S else 0.0


def _ready_of(ray: Any, refs: List[Any]) -> List[Any]:
    ready: List[Any] = ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else []
    return ready


def _take(ray: Any, ready: Sequence[Any]) -> List[Arrival]:
    """Return one arrival of each reference."""
    items = []
    for ref in ready:
        try:
            items.append((ref, next(ref) if is_stream(ref) else ref))
        except StopIteration:
            items.append((ref, None))
    values = iter(_get(ray, [item for _, item in items if item is not None]))
    arrivals = []
    for ref, item in items:
        value, error = next(values) if item is not None else (NO_VALUE, None)
        arrivals.append(Arrival(ref, value, error, item is None or error is not None or not is_stream(ref)))
    return arrivals


def _get(ray: Any, refs: List[Any]) -> List[Any]:
    """Return (value, error) of each reference. All are ready."""
    try:
        return [(value, None) for value in ray.get(refs)]
    except ray.exceptions.RayError:  # of the first reference that has one
        return [_get_one(ray, ref) for ref in refs]


def _get_one(ray: Any, ref: Any) -> Any:
    try:
        return ray.get(ref), None
    except ray.exceptions.RayError as error:
        return NO_VALUE, error
