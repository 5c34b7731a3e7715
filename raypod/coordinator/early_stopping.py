"""Decide from the evaluations of a run whether it ends early. The decision depends on nothing else."""

from __future__ import annotations

import math
from typing import Iterable, Optional

from raypod.events import EvaluationDone, StoppedEarly
from raypod.plan.metric import Metric
from raypod.plan.plan import Plan


def early_stop(plan: Plan, evaluations: Iterable[EvaluationDone]) -> Optional[StoppedEarly]:
    """Return how the evaluations end a run before its last update; None if they do not.

    Only the evaluations of `--evaluate-every` count: a run that was resumed may have others, of its earlier ends.
    """
    patience = plan.patience
    if patience is None:
        return None
    every = (plan.config.training.evaluate_every or 1) * plan.updates_per_epoch
    counted = [each for each in evaluations if each.update % every == 0 and each.update < plan.total_updates]
    return first_stop(plan.early_stopping_metric, patience, counted)


def first_stop(metric: Metric, patience: int, evaluations: Iterable[EvaluationDone]) -> Optional[StoppedEarly]:
    """Return the first point after which `patience` evaluations in a row were not better than the best before them.

    NaN is the worst value, and so is infinity: `evaluations.jsonl`, from which a resumed run decides, has no infinity.
    """
    best: Optional[EvaluationDone] = None
    without_improvement = 0
    for each in sorted(evaluations, key=lambda evaluation: evaluation.update):
        if best is None or metric.is_better(*(_recorded(one.metrics[metric.name]) for one in (each, best))):
            best, without_improvement = each, 0
            continue
        without_improvement += 1
        if without_improvement == patience:
            return StoppedEarly(each.update, metric.name, patience, best.update, _recorded(best.metrics[metric.name]))
    return None


def _recorded(value: float) -> float:
    return value if math.isfinite(value) else math.nan
