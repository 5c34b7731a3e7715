"""Warnings of a training that diverges: a loss far above its start, and losses and metrics that are not finite."""

from __future__ import annotations

import collections
import math
import statistics
from typing import Deque, Iterator, List, Mapping, Optional, Set

from raypod.events import EpochDone, EvaluationDone, Event, InstanceWarned, UpdateDone
from raypod.plan.learning_rate import RANGE_TEST
from raypod.plan.plan import Plan

_FIRST, _RECENT = 5, 10  # losses at the start of the process, whose largest counts, and newest ones, with their median
_FACTOR = 3.0
_WAY_ON = "`raypod lr-range` with the same flags suggests a learning rate"


class Divergence:
    """Returns each kind of warning once in a run."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._first: List[float] = []
        self._recent: Deque[float] = collections.deque(maxlen=_RECENT)
        self._rate = ""
        self._known: Set[str] = set()

    def warnings(self, event: Event) -> Iterator[InstanceWarned]:
        """Yield the warning of an event, if it has one: an event that every view of a run shows."""
        config, found = self._plan.config, None
        if config.ipu.synthetic_data_on_device or config.training.lr_schedule == RANGE_TEST:
            return
        if isinstance(event, UpdateDone) and event.has_results:
            self._rate = "" if event.learning_rate is None else f" (learning rate {event.learning_rate:.3g})"
            found = self._of_loss(event)
        elif isinstance(event, EpochDone):
            found = self._of_metrics(event.metrics, f"in epoch {event.epoch}")
        elif isinstance(event, EvaluationDone):
            found = self._of_metrics(event.metrics, f"on the test split after update {event.update}")
        if found is not None:
            yield InstanceWarned(0, found, "")

    def _of_loss(self, event: UpdateDone) -> Optional[str]:
        if not math.isfinite(event.loss):
            stops = self._plan.config.stops_if_not_finite
            consequence = "the run stops" if stops else "the run continues (--on-nonfinite continue)"
            return self._once(
                "loss", f"the loss became {event.loss} at update {event.update}{self._rate}; {consequence}; {_WAY_ON}"
            )
        self._recent.append(event.loss)
        if len(self._first) < _FIRST:
            self._first.append(event.loss)
            return None
        start, recent = max(self._first), statistics.median(self._recent)
        if start <= 0 or len(self._recent) < _RECENT or recent <= _FACTOR * start:
            return None
        return self._once(
            "rise",
            f"the loss is {recent:.4g} at update {event.update}{self._rate}, after {start:.4g} at the start: it "
            f"diverges; {_WAY_ON}",
        )

    def _of_metrics(self, metrics: Mapping[str, float], where: str) -> Optional[str]:
        wrong = [f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)]
        if not wrong or "loss" in self._known:
            return None
        return self._once(
            "metric",
            f"{wrong[0]} {where}{self._rate}: no sample counts in it, or a value is not finite, as with a learning "
            f"rate that is too high; {_WAY_ON}",
        )

    def _once(self, kind: str, text: str) -> Optional[str]:
        if kind in self._known:
            return None
        self._known.add(kind)
        return text
