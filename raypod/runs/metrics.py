"""Aggregate the reports of all instances into one record per update, and write and read `metrics.jsonl`.

Values of replicas are combined by exact summation, so that the loss of an update does not depend on how the replicas
are distributed over instances. `metrics.jsonl` holds every update; the progress bar and the summary derive from it.
The metrics of an epoch are ratios of the sums over its updates, which checkpoints contain for the epoch in progress.

The reports of several instances arrive in any order, so that the reports of two calls may complete within a millisecond
of each other. The time between them says nothing about the speed; the time of all calls of a second does.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Any, Callable, Deque, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Type, TypeVar, Union

from raypod.events import CallDone, CallReport, CallTimes, EpochDone, EvaluationDone, UpdateDone
from raypod.plan.learning_rate import learning_rate, loss_scaling
from raypod.plan.metric import EpochSums, ExactSum, add_sums, values_of
from raypod.plan.plan import Plan
from raypod.plan.values import NORMS
from raypod.runs.growing_file import last_lines
from raypod.system.files import keep_beginning, parse_json

WINDOW_S = 1.0


class RecentThroughput:
    """Samples per second over the newest calls that together took at least `WINDOW_S` seconds."""

    def __init__(self) -> None:
        self._calls: Deque[Tuple[int, float]] = collections.deque()  # (samples, seconds), oldest first
        self._samples, self._seconds = 0, 0.0

    def add(self, samples: int, elapsed_s: float) -> None:
        """Add a call that completed `elapsed_s` after the one before it."""
        self._calls.append((samples, elapsed_s))
        self._samples, self._seconds = self._samples + samples, self._seconds + elapsed_s
        while self._seconds - self._calls[0][1] >= WINDOW_S:
            oldest_samples, oldest_s = self._calls.popleft()
            self._samples, self._seconds = self._samples - oldest_samples, self._seconds - oldest_s

    def clear(self) -> None:
        """Forget all calls."""
        self._calls.clear()
        self._samples, self._seconds = 0, 0.0

    @property
    def per_s(self) -> float:
        """Samples per second; 0 without a call."""
        return self._samples / self._seconds if self._seconds > 0 else 0.0


_MAX_POINTS = 1024  # at which the sums of an epoch are kept; instances hold the state of one of the newest


class MetricsAggregator:
    """Emits the updates of a call, in order and each once, as soon as every instance has reported the call.

    `position` is the number of updates that the run has done; after a rollback it is less than `last.update`, the
    newest update that was emitted. An elastic run emits the updates after a rollback again: with other replicas they
    have other bits. `on_repeat` is called with the update of such a rollback.
    """

    def __init__(self, plan: Plan, started_at_s: float) -> None:
        self._plan = plan
        self._started_at_s = started_at_s
        self._pending: Dict[int, List[CallReport]] = {}  # by first update
        self._last_call_s = started_at_s
        self._calls = 0
        self._timed_samples, self._timed_s = 0, 0.0
        self._recent = RecentThroughput()
        self._data_wait_s, self._call_s = 0.0, 0.0
        self._epoch: List[ExactSum] = []  # of the epoch in progress; empty at its beginning
        self._known_sums: Dict[int, EpochSums] = {}  # by update, at the points to which a run may return
        self._completed_calls: List[CallDone] = []
        self._emitted = 0  # later updates are emitted when they are done
        self.on_repeat: Callable[[int], None] = lambda update: None
        self.position = 0
        self.epochs_done = 0
        self.last: Optional[UpdateDone] = None
        self.first_update_s: Optional[float] = None

    def begin_at(self, update: int) -> None:
        """Start the run after `update` updates; discard all pending reports."""
        self._pending.clear()
        if update != self.position:
            self._restore_epoch(self._known_sums.get(update, {}))
        self.position = update

    def know_epoch_sums(self, update: int, sums: EpochSums) -> None:
        """Note the sums of the epoch in progress after `update` updates, for a later `begin_at` or `rollback_to`."""
        self._known_sums.pop(update, None)
        self._known_sums[update] = sums
        if len(self._known_sums) > _MAX_POINTS:
            del self._known_sums[next(iter(self._known_sums))]

    def epoch_sums(self) -> EpochSums:
        """Return the sums over the updates of the epoch in progress, for a checkpoint; empty between two epochs."""
        if not self._epoch or self.position % self._plan.updates_per_epoch == 0:
            return {}
        sums = iter([list(each.parts) for each in self._epoch])
        return {metric.name: [next(sums), next(sums)] for metric in self._plan.task.metrics}

    def _restore_epoch(self, sums: EpochSums) -> None:
        """Continue an epoch. The sums of older checkpoints, and of a metric that is new, begin here."""
        names = [metric.name for metric in self._plan.task.metrics]
        self._epoch = [ExactSum(parts) for name in names for parts in sums.get(name, ((), ()))]

    def resize(self, plan: Plan) -> None:
        """Continue with a plan of other instances, whose updates have the same samples. No report is pending."""
        self._plan = plan

    def begin_segment(self, now_s: float) -> None:
        """Exclude the time before a segment (start, save, evaluation) from the throughput."""
        self._last_call_s = now_s
        self.know_epoch_sums(self.position, self.epoch_sums())

    def add(self, report: CallReport, now_s: float) -> List[UpdateDone]:
        """Add a report and return the updates that it completes."""
        reports = self._pending.setdefault(report.first_update, [])
        reports.append(report)
        if len(reports) < self._plan.geometry.num_instances:
            return []
        return self._complete(report.first_update, now_s)

    def missing_reports(self, update: int) -> List[Tuple[int, int]]:
        """Return (first update of the call, instance) of the reports that the updates until `update` lack."""
        return [(first, index) for first in self._calls_until(update) for index in self._missing_in(first)]

    def add_lost_reports(self, reports: Iterable[CallReport]) -> None:
        """Add reports of lost instances, for `rollback_to`."""
        for report in reports:
            if report.instance in self._missing_in(report.first_update):
                self._pending.setdefault(report.first_update, []).append(report)

    def rollback_to(self, update: int, now_s: float) -> List[UpdateDone]:
        """Continue after `update`: emit pending updates before it, discard later ones.

        Updates that lack a report have no metrics (NaN): those of the other instances are not theirs.
        """
        updates = [each for first in self._calls_until(update) for each in self._complete(first, now_s)]
        self.begin_at(update)
        if self._plan.config.pod.is_elastic and update < self._emitted:
            self._emitted, self.epochs_done = update, min(self.epochs_done, update // self._plan.updates_per_epoch)
            self.on_repeat(update)
        return updates

    def take_calls(self) -> List[CallDone]:
        """Return the calls that were completed since the previous `take_calls`."""
        calls, self._completed_calls = self._completed_calls, []
        return calls

    def _calls_until(self, update: int) -> range:
        """Return the first updates of the calls that are not complete."""
        return range(self.position, update, self._plan.geometry.device_iterations)

    def _missing_in(self, first_update: int) -> List[int]:
        """Return the instances that have not reported a call."""
        reported = {report.instance for report in self._pending.get(first_update, ())}
        return [index for index in range(self._plan.geometry.num_instances) if index not in reported]

    def _complete(self, first_update: int, now_s: float) -> List[UpdateDone]:
        """Return the updates of a call, except those that were emitted before."""
        missing = tuple(self._missing_in(first_update))
        reports = sorted(self._pending.pop(first_update, []), key=lambda each: each.instance)
        elapsed_s, self._last_call_s = now_s - self._last_call_s, now_s
        samples = self._plan.geometry.samples_per_call
        if self._calls == 1:  # the first call includes the compilation
            self._recent.clear()
        self._recent.add(samples, elapsed_s)
        data_wait_s = math.fsum(each.data_wait_s for each in reports)
        call_s = math.fsum(each.call_s for each in reports)
        if self._calls:
            self._timed_samples, self._timed_s = self._timed_samples + samples, self._timed_s + elapsed_s
            self._data_wait_s, self._call_s = self._data_wait_s + data_wait_s, self._call_s + call_s
        self._calls += 1
        if self.first_update_s is None:
            self.first_update_s = now_s - self._started_at_s
        rate = self._recent.per_s
        digests = tuple((each.instance, each.samples_digest) for each in reports if each.samples_digest)
        times = tuple(CallTimes(each.instance, each.call_s, each.data_wait_s, each.peer_wait_s) for each in reports)
        profiles = tuple(each.profile for each in reports if each.profile is not None)
        self._completed_calls.append(CallDone(first_update, digests, times, profiles))
        updates, metrics, training = [], self._plan.task.metrics, self._plan.config.training
        norms = next((each.norms for each in reports if each.norms), ())
        # The optimizer's values change between calls only.
        of_schedule = learning_rate(
            self._plan.config, first_update, self._plan.total_updates, self._plan.updates_per_epoch
        )
        for index in range(self._plan.geometry.device_iterations):
            update = first_update + index + 1
            sums = add_sums([of_replica for report in reports for of_replica in report.sums[index]])
            sums = sums if sums and not missing else [0.0] * 2 * len(metrics)
            self._add_to_epoch(update, sums)
            updates.append(
                UpdateDone(
                    update=update,
                    epoch=(update - 1) // self._plan.updates_per_epoch + 1,
                    metrics=values_of(metrics, sums),
                    samples=update * self._plan.geometry.global_batch_size,
                    samples_per_s=rate,
                    time_s=now_s - self._started_at_s,
                    data_wait_share=data_wait_s / call_s if call_s > 0 else 0.0,
                    missing_reports=missing,
                    part_rates=self._plan.task.part_rates(rate),
                    learning_rate=of_schedule,
                    loss_scaling=loss_scaling(training, first_update // self._plan.updates_per_epoch),
                    norms=norms[index] if norms else {},
                )
            )
        self.position = updates[-1].update
        if self._plan.config.run.has_snapshot_after(self.position):
            self.know_epoch_sums(self.position, self.epoch_sums())
        new = [update for update in updates if update.update > self._emitted]
        if new:
            self.last, self._emitted = new[-1], new[-1].update
        return new

    def end_epoch(self, epoch: int) -> EpochDone:
        """Return the metrics over all updates of the epoch that have ended. `epoch` is 0-based."""
        sums, self._epoch, self.epochs_done = [each.value for each in self._epoch], [], epoch + 1
        metrics = self._plan.task.metrics
        return EpochDone(epoch + 1, values_of(metrics, sums or [0.0] * 2 * len(metrics)))

    def _add_to_epoch(self, update: int, sums: Sequence[float]) -> None:
        """Add the sums of an update, 1-based. Those of a repeated one are not in the sums that a rollback restored."""
        if not self._epoch or (update - 1) % self._plan.updates_per_epoch == 0:
            self._restore_epoch({})
        for total, value in zip(self._epoch, sums):
            total.add(value)

    @property
    def samples_per_s(self) -> float:
        """Samples of all replicas per second of training, without the first call."""
        return self._timed_samples / self._timed_s if self._timed_s > 0 else 0.0

    @property
    def data_wait_share(self) -> float:
        """The share of the calls' time that they wait for data (0..1), without the first call."""
        return self._data_wait_s / self._call_s if self._call_s > 0 else 0.0


Measured = TypeVar("Measured", UpdateDone, EvaluationDone)
_GROUPS = ("metrics", "part_rates", "norms")  # fields that hold values by name
_FIELDS = {kind: {field.name for field in dataclasses.fields(kind)} for kind in (UpdateDone, EvaluationDone)}


def flat(event: Union[UpdateDone, EvaluationDone]) -> Dict[str, Any]:
    """Return the fields of an event with its metrics, rates and norms among them, for `summary.json` and tables.

    None is left out, and so are details, which have a file of their own.
    """
    record: Dict[str, Any] = {}
    for name, value in vars(event).items():
        if value is not None and name != "details":
            record.update(value if name in _GROUPS else {name: list(value) if isinstance(value, tuple) else value})
    return record


def line_of(event: Union[UpdateDone, EvaluationDone]) -> Dict[str, Any]:
    """Return an event as a line of its file.

    The metrics of an update are also at the top level: programs of users read them there. The next version drops those.
    """
    return {**flat(event), "metrics": event.metrics} if isinstance(event, UpdateDone) else flat(event)


def events_in(event_type: Type[Measured], records: Iterable[Mapping[str, Any]]) -> List[Measured]:
    """Return the events of lines. Evaluations, and updates of earlier versions, have metrics at the top level only.

    Lines of something else are skipped. null reads as NaN.
    """
    found = []
    for record in records:
        with contextlib.suppress(TypeError):  # it lacks a field, or has one of another kind
            found.append(_event_of(event_type, record))
    return found


def _event_of(event_type: Type[Measured], record: Mapping[str, Any]) -> Measured:
    values = {name: value for name, value in record.items() if name not in _FIELDS[event_type]}
    fields = {name: record[name] for name in _FIELDS[event_type] - {*_GROUPS, "details"} if name in record}
    metrics = record.get("metrics", {})
    if event_type is UpdateDone:
        fields["missing_reports"] = tuple(fields.get("missing_reports", ()))
        fields["norms"] = {name: values.pop(name) for name in NORMS if name in values}
        rates = [name for name in values if name.endswith("_per_s") and name not in metrics]
        fields["part_rates"] = {name: values.pop(name) for name in rates}
    if "metrics" not in record:
        metrics = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    if not isinstance(metrics, dict) or type(fields.get("update")) is not int:
        raise TypeError("no line of this kind")
    known = {name: math.nan if value is None else value for name, value in metrics.items()}
    return event_type(metrics=known, **fields)


def traces_of(update: UpdateDone) -> Dict[str, float]:
    """Return what is known of the optimizer in an update, by the names of `plan.values.TRACES`."""
    of_optimizer = {"learning_rate": update.learning_rate, "loss_scaling": update.loss_scaling}
    known = {name: value for name, value in of_optimizer.items() if value is not None}
    return {**known, **{name: value for name, value in update.norms.items() if not math.isnan(value)}}


def keep_until(path: Path, update: int) -> None:
    """Remove the lines after `update`."""
    # The lines are in the order of their updates, and only the last one can be truncated.
    kept = (line.end for line in last_lines(path) if update_of(line.text) <= update)
    keep_beginning(path, next(kept, 0))


def update_of(line: bytes) -> float:
    """Return the update of a line; infinity for a truncated line."""
    try:
        content: Any = parse_json(line)
        return int(content["update"])
    except (ValueError, KeyError, TypeError):
        return math.inf
