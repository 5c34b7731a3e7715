"""From the reports of all instances to one line per update: folding, throughput, and the file that keeps it.

Numbers of replicas are combined with exact summation, so that the loss of an update does not depend on how the
replicas are spread over instances. `metrics.jsonl` is the truth; bar and summary are views of it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Dict, List, Optional

from raypod.durable import AppendedLines, replace_file
from raypod.events import CallDone, CallReport, EpochDone, UpdateDone
from raypod.plan import Leg, Plan


class MetricsFold:
    """Waits until every instance has reported a call, then tells its updates in order."""

    def __init__(self, plan: Plan, started_at_s: float) -> None:
        self._plan = plan
        self._started_at_s = started_at_s
        self._waiting: Dict[int, List[CallReport]] = {}
        self._mark_s = started_at_s
        self._calls = 0
        self._timed_samples, self._timed_s = 0, 0.0
        self._data_wait_s, self._call_s = 0.0, 0.0
        self._epoch: List[UpdateDone] = []
        self.last: Optional[UpdateDone] = None
        self.last_call: Optional[CallDone] = None
        self.first_update_s: Optional[float] = None

    def begin_leg(self, now_s: float) -> None:
        """Time before a leg (starting, saving, evaluating) is not training time."""
        self._mark_s = now_s

    def add(self, report: CallReport, leg: Leg, now_s: float) -> List[UpdateDone]:
        """The updates that this report completes (none while other instances still owe theirs)."""
        reports = self._waiting.setdefault(report.first_update, [])
        reports.append(report)
        if len(reports) < self._plan.geometry.num_instances:
            return []
        del self._waiting[report.first_update]
        reports.sort(key=lambda each: each.instance)
        elapsed_s, self._mark_s = now_s - self._mark_s, now_s
        samples = self._plan.geometry.samples_per_call
        if self._calls:  # the first call compiles
            self._timed_samples, self._timed_s = self._timed_samples + samples, self._timed_s + elapsed_s
            self._data_wait_s += math.fsum(each.data_wait_s for each in reports)
            self._call_s += math.fsum(each.call_s for each in reports)
        self._calls += 1
        if self.first_update_s is None:
            self.first_update_s = now_s - self._started_at_s
        rate = samples / elapsed_s if elapsed_s > 0 else 0.0
        updates = [self._update(reports, index, leg.epoch, rate, now_s) for index in range(len(report.losses))]
        self._epoch.extend(updates)
        self.last = updates[-1]
        digests = tuple((each.instance, each.samples_digest) for each in reports if each.samples_digest)
        self.last_call = CallDone(report.first_update, digests)
        return updates

    def end_epoch(self, epoch: int) -> EpochDone:
        """Means over the updates since the last epoch ended."""
        done, self._epoch = self._epoch, []
        count = len(done)
        loss = math.fsum(update.loss for update in done) / count
        return EpochDone(epoch + 1, loss, math.fsum(update.accuracy for update in done) / count)

    @property
    def samples_per_s(self) -> float:
        """Samples of all replicas per second of training, without the first call."""
        return self._timed_samples / self._timed_s if self._timed_s > 0 else 0.0

    @property
    def data_wait_share(self) -> float:
        """Of the time that calls took, the part they waited for their data (0..1), without the first call."""
        return self._data_wait_s / self._call_s if self._call_s > 0 else 0.0

    def _update(self, reports: List[CallReport], index: int, epoch: int, rate: float, now_s: float) -> UpdateDone:
        losses = [loss for report in reports for loss in report.losses[index]]
        correct = sum(sum(report.correct[index]) for report in reports)
        update = reports[0].first_update + index + 1
        return UpdateDone(
            update=update,
            epoch=epoch + 1,
            loss=math.fsum(losses) / len(losses),
            accuracy=100.0 * correct / self._plan.geometry.global_batch_size,
            samples=update * self._plan.geometry.global_batch_size,
            samples_per_s=rate,
            time_s=now_s - self._started_at_s,
            data_wait_share=_share(reports),
        )


def _share(reports: List[CallReport]) -> float:
    call_s = math.fsum(report.call_s for report in reports)
    return math.fsum(report.data_wait_s for report in reports) / call_s if call_s > 0 else 0.0


class JsonLines:
    """metrics.jsonl: one line per update, written as it comes."""

    def __init__(self, path: Path, first_update: int) -> None:
        """Keep what a resumed run wrote up to `first_update`; what it did beyond that will be done again."""
        kept = [line for line in _lines(path) if _update_of(line) <= first_update] if first_update else []
        replace_file(path, "".join(kept).encode())
        self._file = AppendedLines(path)

    @property
    def waits_for_room(self) -> bool:
        """Whether lines wait in memory for room on the disk."""
        return self._file.waits_for_room

    def write(self, update: UpdateDone) -> None:
        """Append one line."""
        self._file.write(json.dumps(dataclasses.asdict(update)))

    def sync(self) -> None:
        """All lines on the disk, if there is room."""
        self._file.sync()

    def close(self) -> None:
        """Close. OSError if lines could not be written."""
        self._file.close()


def _lines(path: Path) -> List[str]:
    return path.read_text().splitlines(keepends=True) if path.is_file() else []


def _update_of(line: str) -> float:
    """The update of a line; infinity for a line that was cut off."""
    try:
        content: Any = json.loads(line)
        return int(content["update"])
    except (ValueError, KeyError, TypeError):
        return math.inf
