"""The remaining time of a run, estimated from its events."""

from __future__ import annotations

import math
from typing import Optional

from raypod.events import EvaluationDone, Event, InstanceLost, Repaired, Resized, UpdateDone

_PACE_S = 60.0  # the time of training from which the pace is estimated, at least `_PACE_CALLS` calls
_PACE_CALLS = 10
_SMOOTH_S = 30.0  # after which the shown end of the run follows the estimated one
_SMOOTH_SHARE = 0.25  # of the remaining time, if that is shorter
_LARGEST_STEP = 0.5  # of one call, as a share of the difference


class RemainingTime:
    """Estimates when a run ends: from the pace of its recent calls, and the share of its evaluations.

    A repair is an exception, which moves the end by its duration and does not change the pace. The end moves gradually,
    so that one slow call or the first evaluation does not multiply the remaining time.
    """

    def __init__(self, total_updates: int, updates_per_call: int = 1) -> None:
        self._total, self._per_call = total_updates, updates_per_call
        self._last: Optional[UpdateDone] = None  # of the newest call; the duration of the first is not counted
        self._train_s, self._trained = 0.0, 0.0  # of recent calls, with weights that decay
        self._evaluate_s, self._evaluated = 0.0, 0  # of the evaluations, and the updates until the newest of them
        self._since_evaluation = 0
        self._has_evaluated, self._has_failed = False, False  # since the newest call
        self._estimates = 0
        self._now_s, self._end_s = 0.0, math.nan

    @property
    def left_s(self) -> Optional[float]:
        """The time from the newest update to the end of the run, in seconds; None if it is not known yet."""
        return max(0.0, self._end_s - self._now_s) if math.isfinite(self._end_s) else None

    def add(self, event: Event) -> None:
        """Take an event of the run into account."""
        if isinstance(event, EvaluationDone):
            self._has_evaluated = True
        elif isinstance(event, (InstanceLost, Repaired, Resized)):
            self._has_failed = True
        elif isinstance(event, UpdateDone):
            self._now_s = event.time_s
            if event.update % self._per_call == 0 or event.update >= self._total:
                self._add_call(event)

    def _add_call(self, event: UpdateDone) -> None:
        last, self._last = self._last, event
        if last is None or event.update <= last.update:
            return
        updates, elapsed_s = event.update - last.update, event.time_s - last.time_s
        if self._has_evaluated or self._has_failed:
            self._add_pause(max(0.0, elapsed_s - updates * self._pace_s))
        else:
            kept = 0.5 ** (elapsed_s / max(_PACE_S, _PACE_CALLS * elapsed_s))
            self._train_s, self._trained = kept * self._train_s + elapsed_s, kept * self._trained + updates
        self._has_evaluated = self._has_failed = False
        self._since_evaluation += updates
        if self._trained:
            self._move_end(event.time_s, elapsed_s, self._total - event.update)

    def _add_pause(self, seconds: float) -> None:
        if self._has_failed:
            self._end_s += seconds
        else:
            self._evaluate_s += seconds
            self._evaluated += self._since_evaluation
            self._since_evaluation = 0

    def _move_end(self, now_s: float, elapsed_s: float, updates: int) -> None:
        evaluation_s = self._evaluate_s / self._evaluated if self._evaluated else 0.0
        left_s = (self._pace_s + evaluation_s) * updates
        self._estimates += 1
        within_s = min(_SMOOTH_S, _SMOOTH_SHARE * left_s)
        share = min(_LARGEST_STEP, 1.0 - math.exp(-elapsed_s / within_s)) if within_s > 0 else 1.0
        share = max(share, 1.0 / self._estimates)
        before_s = self._end_s if self._estimates > 1 else 0.0
        self._end_s = before_s + share * (now_s + left_s - before_s)

    @property
    def _pace_s(self) -> float:
        return self._train_s / self._trained if self._trained else 0.0
