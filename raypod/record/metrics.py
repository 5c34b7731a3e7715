"""From the reports of all instances to one line per update: folding, throughput, and the file that keeps it.

Numbers of replicas are combined with exact summation, so that the loss of an update does not depend on how the
replicas are spread over instances. `metrics.jsonl` is the truth; bar and summary are views of it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

from raypod.events import CallDone, CallReport, EpochDone, EvaluationDone, UpdateDone
from raypod.host import files
from raypod.host.files import AppendedLines, replace_file
from raypod.plan.plan import Plan


class MetricsFold:
    """Waits until every instance has reported a call, then tells its updates in order, each once.

    `position` is the update after which the run is; after a step back it is behind `last`, the last one told.
    """

    def __init__(self, plan: Plan, started_at_s: float) -> None:
        self._plan = plan
        self._started_at_s = started_at_s
        self._waiting: Dict[int, List[CallReport]] = {}
        self._mark_s = started_at_s
        self._calls = 0
        self._timed_samples, self._timed_s = 0, 0.0
        self._data_wait_s, self._call_s = 0.0, 0.0
        self._epoch: List[UpdateDone] = []
        self.position = 0
        self.epochs_done = 0
        self.last: Optional[UpdateDone] = None
        self._calls_told: List[CallDone] = []
        self.first_update_s: Optional[float] = None

    def begin_leg(self, now_s: float) -> None:
        """Time before a leg (starting, saving, evaluating) is not training time."""
        self._mark_s = now_s

    def add(self, report: CallReport, now_s: float) -> List[UpdateDone]:
        """The updates that this report completes (none while other instances still owe theirs)."""
        reports = self._waiting.setdefault(report.first_update, [])
        reports.append(report)
        if len(reports) < self._plan.geometry.num_instances:
            return []
        return self._tell(report.first_update, now_s)

    def settle(self, update: int, now_s: float) -> List[UpdateDone]:
        """The run goes on after update `update`: the updates up to there that have not been told.

        Of those the reports of lost instances may be missing: they are told as the others saw them. Reports of what
        lies beyond are dropped, as it will be done again.
        """
        calls = sorted(first for first in self._waiting if first < update)
        told = [each for first in calls for each in self._tell(first, now_s)]
        self._waiting.clear()
        self.position = update
        return told

    def take_calls(self) -> List[CallDone]:
        """The calls that were completed since this was last asked."""
        calls, self._calls_told = self._calls_told, []
        return calls

    def _tell(self, first_update: int, now_s: float) -> List[UpdateDone]:
        """The updates of a call, but for those that were told before a step back."""
        reports = sorted(self._waiting.pop(first_update), key=lambda each: each.instance)
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
        digests = tuple((each.instance, each.samples_digest) for each in reports if each.samples_digest)
        self._calls_told.append(CallDone(first_update, digests))
        updates = [self._update(reports, index, rate, now_s) for index in range(len(reports[0].losses))]
        self.position = updates[-1].update
        new = [update for update in updates if self.last is None or update.update > self.last.update]
        self._epoch.extend(new)
        self.last = new[-1] if new else self.last
        return new

    def end_epoch(self, epoch: int) -> EpochDone:
        """Means over the updates since the last epoch ended."""
        done, self._epoch, self.epochs_done = self._epoch, [], epoch + 1
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

    def _update(self, reports: List[CallReport], index: int, rate: float, now_s: float) -> UpdateDone:
        geometry = self._plan.geometry
        losses = [loss for report in reports for loss in report.losses[index]]
        correct = sum(sum(report.correct[index]) for report in reports)
        update = reports[0].first_update + index + 1
        return UpdateDone(
            update=update,
            epoch=(update - 1) // self._plan.updates_per_epoch + 1,
            loss=math.fsum(losses) / len(losses),
            accuracy=100.0 * correct / (len(losses) * geometry.replica_samples),
            samples=update * geometry.global_batch_size,
            samples_per_s=rate,
            time_s=now_s - self._started_at_s,
            data_wait_share=_share(reports),
        )


def _share(reports: List[CallReport]) -> float:
    call_s = math.fsum(report.call_s for report in reports)
    return math.fsum(report.data_wait_s for report in reports) / call_s if call_s > 0 else 0.0


class JsonLines:
    """A file of one line per record, each of an update: metrics.jsonl, evaluations.jsonl. Written as it comes."""

    def __init__(self, path: Path, first_update: int) -> None:
        """Keep what a resumed run wrote up to `first_update`; what it did beyond that will be done again."""
        kept = [line for line in _lines(path) if _update_of(line) <= first_update] if first_update else []
        replace_file(path, "".join(kept).encode())
        self._file = AppendedLines(path)

    def write(self, record: Union[UpdateDone, EvaluationDone]) -> None:
        """Append one line."""
        self._file.add(files.plain_json(dataclasses.asdict(record)))

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
