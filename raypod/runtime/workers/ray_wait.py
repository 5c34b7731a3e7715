"""Take everything that Ray has ready at once, and detect pauses of this process. Used by training and by launches."""

from __future__ import annotations

import collections
import time
from typing import Any, Deque, Iterable, List, NamedTuple, Optional, Sequence, Tuple

NO_VALUE = object()
_GATHER_S = 0.005  # the reports of a call arrive within a few milliseconds
_PAUSE_S = 2.0  # longer intervals between two polls are pauses
_KEPT_PAUSES = 100


class Arrival(NamedTuple):
    """A result, an item of a stream, or the end of either: one of `value` and `error` is set."""

    ref: Any
    value: Any  # NO_VALUE for the end of a stream, or with an error
    error: Optional[Exception]
    is_finished: bool  # nothing more arrives from `ref`


def take_ready(ray: Any, refs: Iterable[Any], within_s: float) -> List[Arrival]:
    """Return all results that are ready, and the next item of each stream that has one; wait for the first of them.

    Returns an empty list if nothing is ready within a time. `ray.wait` returns once a given number is ready, and its
    cost grows with the number of references. Therefore the second wait is not for the next one only.
    """
    waiting = list(refs)
    if not waiting or (within_s > 0 and not ray.wait(waiting, timeout=within_s)[0]):
        return []
    ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=min(within_s, _GATHER_S))
    return _take(ray, ready)


class PauseDetector:
    """Detects that this process did not poll: it was stopped, or blocked by its output. Others cannot be judged by it.

    While the process does not poll, replies wait to be read; if its whole host stands still, the other processes there
    do nothing either. Therefore timeouts do not count pauses. They count the first seconds of each, so that many
    pauses cannot keep a timeout from ending.
    """

    def __init__(self) -> None:
        self._polled_s = time.monotonic()
        self._pauses: Deque[Tuple[float, float]] = collections.deque(
            maxlen=_KEPT_PAUSES
        )  # (from, to) that do not count

    def poll(self) -> float:
        """Return the seconds since the previous poll that do not count; 0.0 if there was no pause."""
        now_s = time.monotonic()
        from_s, self._polled_s = self._polled_s + _PAUSE_S, now_s
        if now_s <= from_s:
            return 0.0
        self._pauses.append((from_s, now_s))
        return now_s - from_s

    def within(self, duration_s: float, now_s: float) -> float:
        """Return the seconds that do not count of the `duration_s` seconds before `now_s`."""
        since_s = now_s - duration_s
        return sum(max(0.0, to_s - max(from_s, since_s)) for from_s, to_s in self._pauses)


def _take(ray: Any, ready: Sequence[Any]) -> List[Arrival]:
    """Return one arrival of each reference."""
    items = []
    for ref in ready:
        try:
            items.append((ref, next(ref) if _is_stream(ref) else ref))
        except StopIteration:
            items.append((ref, None))
    values = iter(_get(ray, [item for _, item in items if item is not None]))
    arrivals = []
    for ref, item in items:
        value, error = next(values) if item is not None else (NO_VALUE, None)
        arrivals.append(Arrival(ref, value, error, item is None or error is not None or not _is_stream(ref)))
    return arrivals


def _is_stream(ref: Any) -> bool:
    return hasattr(ref, "__next__")


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
