"""The best and the last value of each metric of a run, and the settings that differ between runs."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from raypod.plan.metric import LOSS, Metric

# Of runs whose plan.json does not say it yet: the metrics of the built-in tasks.
_BETTER = {"loss": "lower", "perplexity": "lower", "accuracy": "higher"}
_EVERY_RUN_HAS_ITS_OWN = ("run.run_dir",)


def results_of(
    training: Mapping[str, Any], evaluations: Mapping[str, Any], names: Sequence[str], better: Mapping[str, Any]
) -> List[Dict[str, Any]]:
    """Return {name, split, last, best, update of the best} of each metric, the loss first.

    Args:
        training: the curves of a run; a minimum or maximum of a long run is one of its rows.
        evaluations: the same of the test split.
        names: the metrics of the training.
        better: "lower" or "higher" by the name of a metric. Without it, `best` and its update are None.
    """
    found = []
    for split, table, of_split in (("training", training, names), ("test", evaluations, evaluations["columns"][3:])):
        for name in of_split:
            column = table["columns"].index(name)
            points = [(row[0], row[column]) for row in table["rows"] if not math.isnan(row[column])]
            update, best = _best(points, better.get(name) or _BETTER.get(name))
            last = points[-1][1] if points else None
            found.append({"name": name, "split": split, "last": last, "best": best, "update": update})
    return found


def _best(points: Sequence[Tuple[int, float]], better: Any) -> Tuple[Optional[int], Optional[float]]:
    """Return the update and the value of the best point, the first of equal ones."""
    if not points or better not in ("lower", "higher"):
        return None, None
    metric = Metric(LOSS.name, better)
    best = points[0]
    for point in points[1:]:
        if metric.is_better(point[1], best[1]):
            best = point
    return best


def differing_settings(configs: Sequence[Mapping[str, Any]]) -> List[str]:
    """Return the names of the settings that are not equal in all runs."""
    names = list(dict.fromkeys(name for config in configs for name in config))
    return [
        name
        for name in names
        if name not in _EVERY_RUN_HAS_ITS_OWN and any(each.get(name) != configs[0].get(name) for each in configs)
    ]
