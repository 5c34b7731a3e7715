"""The curves of a run: the rows of `metrics.jsonl` and `evaluations.jsonl`, of bounded size while a run grows."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, List, Optional, Tuple

from raypod.events import EvaluationDone, UpdateDone
from raypod.observe.report.decimation import FIRST_VALUE, Row, decimate
from raypod.plan.values import TRACES
from raypod.runs.lines import flat

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

    def rows(self, max_rows: int = MAX_ROWS) -> List[Row]:
        """Return at most `max_rows` rows; their values are in the order of `columns`."""
        return decimate(self._rows, max_rows)

    def time_of(self, update: int) -> Tuple[Optional[float], Optional[float]]:
        """Return the samples and the time in seconds after an update; None for both if it is not in the curves."""
        low, high = 0, len(self._rows)
        while low < high:
            middle = (low + high) // 2
            if self._rows[middle][0] < update:
                low = middle + 1
            else:
                high = middle
        return (self._rows[low][1], self._rows[low][2]) if low < len(self._rows) else (None, None)

    def data(self, max_rows: int = MAX_ROWS) -> Dict[str, Any]:
        """Return the curves as plain data; see `run_data`."""
        rows = self.rows(max_rows)
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
