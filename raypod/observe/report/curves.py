"""The curves of a run: the rows of `metrics.jsonl` and `evaluations.jsonl`, of bounded size while a run grows.

No peak and no dip of a long run is lost. The updates are divided into intervals of equal width, a power of two. Of each
interval these rows are kept: for every value the row with its minimum and the row with its maximum, and the first row
that lacks a value. Rows are kept whole, so that every point of a curve is one that was measured.
"""

from __future__ import annotations

import bisect
import math
from typing import Any, Dict, Iterable, List, Optional, Sequence, Set, Tuple

from raypod.events import EvaluationDone, UpdateDone
from raypod.plan.values import TRACES
from raypod.runs.metrics import flat

MAX_ROWS = 4000  # of a run in a page
_ALWAYS = ("samples_per_s", "data_wait_share")
_NAN = math.nan


class Curves:
    """The updates of a run. Memory and work per update are bounded: older updates are kept as minima and maxima.

    `time_s` counts the time of training over all starts of the run. The records of each start count from zero.
    """

    def __init__(self) -> None:
        self.columns: List[str] = []
        self.metrics: List[str] = []
        self.rates: List[str] = []
        self.traces: List[str] = []
        self.updates = 0
        self.epoch: Optional[int] = None
        self._rows: List[Row] = []
        self._last_time_s = self._earlier_s = 0.0

    def add(self, updates: Iterable[UpdateDone]) -> None:
        """Add updates in the order of `metrics.jsonl`."""
        for each in updates:
            if not self.columns:
                self._begin(each)
            while self._rows and self._rows[-1][0] >= each.update:  # a later record of an update supersedes it
                self._rows.pop()
            if each.time_s < self._last_time_s:
                self._earlier_s += self._last_time_s
            self._last_time_s = each.time_s
            values = flat(each)
            row = [each.update, each.samples, round(self._earlier_s + each.time_s, 3)]
            row += [_number(values.get(name)) for name in self.columns[FIRST_VALUE:]]
            self._rows.append(row)
            self.updates += 1
            self.epoch = each.epoch
            if len(self._rows) > 3 * MAX_ROWS:
                self._rows = decimate(self._rows, MAX_ROWS)

    def time_of(self, update: int) -> Tuple[Optional[float], Optional[float]]:
        """Return the samples and the time in seconds after an update; None for both if it is not in the curves."""
        index = bisect.bisect_left(self._rows, [update])
        return (self._rows[index][1], self._rows[index][2]) if index < len(self._rows) else (None, None)

    def data(self, max_rows: int = MAX_ROWS) -> Dict[str, Any]:
        """Return the curves as plain data; see `run_data`."""
        rows = decimate(self._rows, max_rows)
        exact = FIRST_VALUE + len(self.metrics) + len(self.traces)
        return {
            "columns": self.columns,
            "rows": [row[:exact] + [_short(value) for value in row[exact:]] for row in rows],
            "updates": self.updates,
            "decimated": len(rows) < self.updates,
        }

    def _begin(self, update: UpdateDone) -> None:
        known = flat(update)
        self.metrics, self.rates = list(update.metrics), list(update.part_rates)
        self.traces = [name for name in TRACES if name in known and name != "loss_scaling"]
        self.columns = ["update", "samples", "time_s", *self.metrics, *self.traces, *_ALWAYS, *self.rates]


def evaluation_data(evaluations: Iterable[EvaluationDone], curves: Curves) -> Dict[str, Any]:
    """Return evaluations as plain data, with the samples and times of the training."""
    latest = {each.update: each for each in evaluations}
    names = list(dict.fromkeys(name for each in latest.values() for name in each.metrics))
    rows = []
    for update, each in sorted(latest.items()):
        samples, time_s = curves.time_of(update)
        rows.append([update, samples, time_s, *(_number(each.metrics.get(name)) for name in names)])
    return {"columns": ["update", "samples", "time_s", *names], "rows": rows}


def _number(value: Any) -> float:
    return value if isinstance(value, (int, float)) else _NAN


def _short(value: float) -> float:
    return float(f"{value:.6g}") if isinstance(value, float) else value


Row = List[float]  # [update, samples, time in seconds, values ...]; NaN for a value that is missing
FIRST_VALUE = 3  # index of the first value in a row


def decimate(rows: Sequence[Row], max_rows: int) -> List[Row]:
    """Return at most `max_rows` rows (at least 100), in the same order, with the first and the last one.

    Decimating the result of a decimation gives what decimating all rows with the same width would give.
    """
    max_rows = max(100, max_rows)
    if len(rows) <= max_rows:
        return list(rows)
    num_values = len(rows[0]) - FIRST_VALUE
    kept_per_interval = max(1, 2 * num_values + 1)
    intervals = max(1, (max_rows - 2) // kept_per_interval - 1)  # one more if the first is not aligned
    span = rows[-1][0] - rows[0][0] + 1
    width = 1
    while width * intervals < span:
        width *= 2
    kept: Set[int] = {0, len(rows) - 1}
    begin = 0
    while begin < len(rows):
        number, end = rows[begin][0] // width, begin + 1
        while end < len(rows) and rows[end][0] // width == number:
            end += 1
        kept.update(_extremes(rows, begin, end))
        begin = end
    return [rows[index] for index in sorted(kept)]


def _extremes(rows: Sequence[Row], begin: int, end: int) -> Set[int]:
    """Return the indices of the rows of an interval that are kept."""
    kept: Set[int] = set()
    if len(rows[begin]) == FIRST_VALUE:
        kept.add(begin)
    for column in range(FIRST_VALUE, len(rows[begin])):
        values = [row[column] for row in rows[begin:end]]
        finite = list(filter(math.isfinite, values))
        if len(finite) < len(values):
            kept.add(begin + next(index for index, value in enumerate(values) if not math.isfinite(value)))
        if finite:
            kept.update((begin + values.index(min(finite)), begin + values.index(max(finite))))
    return kept
