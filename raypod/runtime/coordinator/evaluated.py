"""What the instances measure together on the test split."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Dict, Mapping, Optional, Sequence

from raypod.events import EvaluationReport
from raypod.plan.metric import sum_exactly, values_of
from raypod.plan.plan import Plan
from raypod.runs.predictions import in_sample_order
from raypod.runtime.workers.fleet import Fleet


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """What the instances have measured together on the test split.

    Attributes:
        samples: the number of samples.
        metrics: the value of each metric.
        predictions: an array [samples, ...] by name, in the order of the samples; "sample" are their numbers. None if
            the task has none.
        details: of `Task.prediction_details`.
    """

    samples: int
    metrics: Dict[str, float]
    predictions: Optional[Mapping[str, Any]] = None
    details: Optional[Mapping[str, Any]] = None


def combined(plan: Plan, fleet: Fleet, reports: Sequence[EvaluationReport]) -> Evaluated:
    """Return what the reports of all instances say together. Instance 0 computes what depends on all predictions.

    Raises:
        FleetBroken, InstanceFailed: instance 0 was lost, or the task's function has failed.
    """
    sums = [sum_exactly(itertools.chain(*parts)) for parts in zip(*(report.sums for report in reports))]
    samples, values = sum(report.samples for report in reports), values_of(plan.task.metrics, sums)
    parts = [report.predictions for report in reports if report.predictions is not None]
    if len(parts) < len(reports):
        return Evaluated(samples, values)
    predictions = in_sample_order(parts)
    more, details = fleet.call_on((0,), "prediction_metrics", predictions)[0]
    return Evaluated(samples, {**values, **more}, predictions, details or None)
