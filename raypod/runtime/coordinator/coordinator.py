"""The main loop of a run: start the fleet, broadcast the weights, train segment by segment, evaluate, save, end.

The instances' reports come in through the fleet; `run` yields the events of the run. Between two updates the
coordinator performs no collective and no file operation.

Warnings of a training that diverges: a loss far above its start, and losses and metrics that are not finite.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import math
import statistics
import time
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import ContextManager, Deque, Dict, Generator, Iterator, List, Mapping, Optional, Sequence, Set, Union, cast

from raypod.errors import CheckpointNotSaved, RaypodError
from raypod.events import (
    CallReport,
    CheckpointFailed,
    EpochDone,
    EvaluationDone,
    EvaluationReport,
    Event,
    InstanceStarted,
    InstanceWarned,
    PhaseBegun,
    RunEnded,
    RunStarted,
    StoppedEarly,
    UpdateDone,
)
from raypod.plan.config import RANGE_TEST
from raypod.plan.plan import Plan, Segment
from raypod.runs.metrics import MetricsAggregator
from raypod.runs.run_folder import origin_of
from raypod.runtime.coordinator.checkpoint_schedule import CheckpointSchedule
from raypod.runtime.coordinator.elastic import Elastic, resize_at_start, start
from raypod.runtime.coordinator.evaluated import combined
from raypod.runtime.coordinator.kept_state import Elsewhere, KeptState, Snapshots
from raypod.runtime.coordinator.recovery import FailurePolicy, Recovery, begin
from raypod.runtime.coordinator.same_data import check_same_data
from raypod.runtime.coordinator.stop import Stop, early_stop, stop_on_signal
from raypod.runtime.worker.control import IDLE
from raypod.runtime.workers.fleet import ElasticFleet, Fleet
from raypod.training.checkpoint import storage
from raypod.training.checkpoint.format import Checkpoint

Events = Generator[Event, None, None]
_RECENT_S = 5.0  # age of a heartbeat, one per second, that still shows what its instance does
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # before the next attempt
_POLL_S = 0.2  # for a signal
_OBJECTS = 8  # per report, that Python's garbage collector counts


@contextlib.contextmanager
def _rare_collections(plan: Plan) -> Iterator[None]:
    """Let Python's garbage collector run about once per call of all instances.

    At its usual threshold, the collections take as long as all else once thousands of instances report a call.
    """
    before = gc.get_threshold()
    if before[0]:  # 0: the user has disabled it
        gc.set_threshold(max(before[0], _OBJECTS * plan.geometry.num_instances), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def run(
    plan: Plan,
    fleet: Fleet,
    metrics: MetricsAggregator,
    resumed: Optional[Checkpoint] = None,
    earlier_evaluations: Sequence[EvaluationDone] = (),
    stop: Optional[Stop] = None,
    copies: Optional[ContextManager[object]] = None,
    elsewhere: Optional[Elsewhere] = None,
) -> Events:
    """Run a plan on a fleet; yield the events of the run as they happen.

    Args:
        plan: what to run.
        fleet: the instances; they are started, and ended.
        metrics: folds the reports of the instances.
        resumed: the checkpoint from which the run continues.
        earlier_evaluations: the evaluations that a resumed run had made before.
        stop: with which the caller can request a stop.
        copies: uses the fleet until it is closed.
        elsewhere: takes the newest state if the run folder does not.
    """
    first_update, stop = resumed.update if resumed else 0, stop or Stop()
    snapshots = Snapshots(plan, fleet)
    with _rare_collections(plan), stop_on_signal(stop), closing(fleet), copies or nullcontext(), closing(snapshots):
        stop.describe = partial(describe_unsaved, plan, fleet, metrics)
        stop.abandon_loading = lambda: fleet.abandon_loading()
        current, started, missing = start(plan, fleet)
        stop.check()
        check_same_data(current, started, resumed)
        begin(current, fleet, resumed)
        metrics.resize(current)
        schedule = CheckpointSchedule(current, started[0], resumed, metrics)
        metrics.begin_at(first_update)
        schedule.use_new_writer(fleet)
        run = plan.config.run
        can_reset = run.reset_command is not None
        policy = FailurePolicy(started[0].device, run.max_restarts, plan.config.pod.is_elastic, can_reset)
        elsewhere = elsewhere or Elsewhere(plan)
        kept = KeptState(plan, fleet, metrics, schedule, snapshots, elsewhere)
        elastic = None
        if plan.config.pod.is_elastic and not plan.is_inline:
            on_ray = cast(ElasticFleet, fleet)
            on_ray.must_leave = lambda: stop.must_leave
            elastic = Elastic(plan, current, on_ray, kept, policy, stop, resumed)
        snapshots.begin()
        recovery = Recovery(plan, fleet, kept, policy, resumed, elastic)
        evaluations = Evaluations(plan, fleet, schedule, earlier_evaluations, stop)
        metrics.on_repeat = evaluations.drop_after
        resized = resize_at_start(plan, current, missing, resumed, fleet.hosts())
        if resized is not None:
            schedule.add_resize(resized)
            yield resized
        yield _run_started(plan, started, fleet, first_update, schedule.generation)
        try:
            # Run the evaluation that the previous process missed.
            yield from recovery.until_done(first_update, partial(evaluations.evaluate, first_update))
            yield from _Training(plan, fleet, metrics, schedule, recovery, evaluations, stop, elastic).events()
        except RaypodError as error:  # the instances have ended their calls
            with stop.saving():
                yield from kept.save_at_end(error)
            if elsewhere.way_on:
                raise elsewhere.named(error) from error
            raise
        stop.begin_end()
        assert schedule.last is not None, "a run ends with a checkpoint"
        saved, stopped = schedule.last, evaluations.early_stop()
        is_interrupted = metrics.position < evaluations.last_update()
        yield PhaseBegun("ending", metrics.position)
        if stopped is not None and not is_interrupted:
            yield stopped
        yield RunEnded(
            *(metrics.position, is_interrupted, saved.weights_sha256, saved.path, stop.cause, saved.ema_sha256),
            preempted=is_interrupted and stop.is_preempted,
            resizes=tuple(schedule.resizes),
        )


class _Training:
    """Trains until all updates are done or a stop is requested."""

    def __init__(
        self,
        plan: Plan,
        fleet: Fleet,
        metrics: MetricsAggregator,
        schedule: CheckpointSchedule,
        recovery: Recovery,
        evaluations: Evaluations,
        stop: Stop,
        elastic: Optional[Elastic],
    ) -> None:
        self._plan, self._fleet, self._metrics, self._schedule = plan, fleet, metrics, schedule
        self._recovery, self._evaluations, self._stop, self._elastic = recovery, evaluations, stop, elastic

    def events(self) -> Iterator[Event]:
        """Train, write the last checkpoint, and run the last evaluation."""
        done = -1
        # If all instances are lost at the end, the run is rolled back and has to train again.
        while done != self._metrics.position:
            with self._stop.deferred():
                while self._metrics.position < self._evaluations.last_update() and not self._stop.requested:
                    yield from self._segment_and_save()
                done = self._metrics.position
                yield from self._finish_save(done)
            if done == self._plan.total_updates:
                yield from self._evaluate(done)

    def _segment_and_save(self) -> Iterator[Event]:
        """Run one segment, then what is due after it: evaluation, checkpoint, leaving hosts that are being drained."""
        segment = self._plan.next_segment(self._metrics.position)
        yield from self._recovery.once(self._run_segment(segment))
        update = self._metrics.position
        is_last = update == self._plan.total_updates
        if segment.ends_epoch and update == segment.end and segment.epoch >= self._metrics.epochs_done:
            ended = self._metrics.end_epoch(segment.epoch)
            yield ended
            yield from self._evaluations.divergence.warnings(ended)
        if not is_last and not self._stop.requested:
            yield from self._save_and_evaluate(update)
        tested = self._evaluations.metrics_after(update)
        draining = [] if is_last or self._stop.requested else self._fleet.draining()
        must_resize = ""
        if draining and not self._recovery.can_move_away_from(draining):
            cause = f"Ray drains host {', '.join(draining)}"
            if self._elastic is not None and self._elastic.can_leave():
                must_resize = cause
            else:
                self._stop.request(cause, is_drained=True)
                draining = []
        if self._schedule.is_due(update) or tested or self._stop.requested or draining:
            yield from self._save(update)
            if not (is_last or draining or self._stop.requested) and self._elastic is not None:
                must_resize = "hosts have returned" if self._elastic.can_grow() else ""
        if draining or must_resize:
            yield from self._change_hosts(update, draining, must_resize)

    def _change_hosts(self, update: int, draining: List[str], must_resize: str) -> Iterator[Event]:
        """Leave the hosts that are `draining`, or use others, too. A full disk is not waited for: hosts end meanwhile.

        `must_resize` is why all instances start again, from a checkpoint; "" if they do not.
        """
        try:
            yield from self._finish_save(update, 0.0)
        except CheckpointNotSaved:
            if self._schedule.failed is None or (draining and must_resize and self._schedule.last is None):
                raise
            if not draining:
                return  # hosts have returned, and are still there when the disk has space
        if must_resize and self._elastic is not None:
            yield from self._elastic.resize(must_resize)
        elif draining:
            yield from self._recovery.move_away_from(draining)

    def _run_segment(self, segment: Segment) -> Iterator[Event]:
        yield PhaseBegun("training", segment.first_update)
        self._metrics.begin_segment(time.monotonic())
        for report in self._fleet.run(segment, partial(self._must_end_segment, segment)):
            yield from self._evaluations.warnings.new_in([report])
            yield from map(self._schedule.record, report.saves)
            updates = self._metrics.add(report, time.monotonic())
            yield from self._metrics.take_calls()
            for update in updates:
                yield update
                yield from self._evaluations.divergence.warnings(update)
                self._schedule.check_finite(update)

    def _must_end_segment(self, segment: Segment) -> bool:
        if self._stop.requested or self._fleet.draining() or self._schedule.must_wait():
            return True
        # Not before the first call: its data can take longer than the interval to load, and again in a new segment.
        return self._metrics.position > segment.first_update and self._schedule.interval_elapsed()

    def _save_and_evaluate(self, update: int) -> Iterator[Event]:
        """Do what is due of both. The checkpoint comes first: an evaluation can fail."""
        if self._schedule.must_wait():
            yield from self._finish_save(update)
        if self._schedule.is_due(update) or self._evaluations.is_due(update):
            yield from self._save(update)
        yield from self._evaluate(update)

    def _save(self, update: int) -> Iterator[Event]:
        """Begin the checkpoint of `update`, unless that is done."""
        tested = self._evaluations.metrics_after(update)
        with self._stop.saving():
            yield from self._recovery.until_done(update, partial(self._schedule.begin, self._fleet, update, tested))

    def _evaluate(self, update: int) -> Iterator[Event]:
        yield from self._recovery.until_done(update, partial(self._evaluations.evaluate, update))

    def _finish_save(self, update: int, limit_s: Optional[float] = None) -> Iterator[Event]:
        """Wait for the checkpoint of `update`, and for its disk; begin it first if that is not done yet."""
        limit_s = self._plan.config.run.save_retry_s if limit_s is None else limit_s
        wait = DiskWait(self._schedule, self._stop, limit_s)
        with self._stop.saving():
            yield from self._recovery.until_done(update, partial(wait.save, self._fleet, update))


class Evaluations:
    """The evaluations of a run. Each update is evaluated at most once: a rollback reproduces the same weights.

    In an elastic run it may not, because other replicas have other bits.
    """

    def __init__(
        self,
        plan: Plan,
        fleet: Fleet,
        schedule: CheckpointSchedule,
        earlier_evaluations: Sequence[EvaluationDone],
        stop: Stop,
    ) -> None:
        """`earlier_evaluations` holds the evaluations that the run had made before it was resumed."""
        self._plan, self._fleet, self._schedule, self._stop = plan, fleet, schedule, stop
        self.warnings = InstanceWarnings(plan)  # also those of the training: each is an event once in a run
        self.divergence = Divergence(plan)
        self._evaluations = {each.update: each for each in earlier_evaluations}

    def drop_after(self, update: int) -> None:
        """Forget the evaluations of later updates: they are computed again, with other bits."""
        self._evaluations = {at: each for at, each in self._evaluations.items() if at <= update}

    def evaluate(self, update: int) -> Iterator[Event]:
        """Evaluate the test split after `update` updates, if that is due and has not been done.

        A preemption with a deadline abandons it: the run that resumes makes it.
        """
        if not self.is_due(update):
            return
        yield PhaseBegun("evaluating", update)
        reports = self._reports()
        if reports is None:
            return
        yield from self.warnings.new_in(reports)
        found = combined(self._plan, self._fleet, reports)
        epoch = (update - 1) // self._plan.updates_per_epoch + 1
        done = EvaluationDone(found.samples, found.metrics, update, epoch, found.details)
        self._evaluations[update] = done
        self._schedule.add_evaluation(update, done.metrics)
        yield done
        yield from self.divergence.warnings(done)

    def is_due(self, update: int) -> bool:
        """Return whether the test split is to be evaluated after `update` updates, and has not been."""
        return self._plan.is_evaluated_after(update) and update not in self._evaluations

    def _reports(self) -> Optional[List[EvaluationReport]]:
        if self._stop.grace_s is None or self._stop.must_leave:  # the latter: of the last update, if there is time
            return self._fleet.call("evaluate")
        return self._fleet.evaluate(lambda: self._stop.must_leave)

    def early_stop(self) -> Optional[StoppedEarly]:
        """Return how the evaluations end the run early; None if they do not."""
        return early_stop(self._plan, self._evaluations.values())

    def last_update(self) -> int:
        """Return the number of updates after which the run ends, as far as it is known."""
        stopped = self.early_stop()
        return self._plan.total_updates if stopped is None else stopped.update

    def metrics_after(self, update: int) -> Dict[str, float]:
        """Return the test metrics after `update` updates; empty if they are unknown."""
        found = self._evaluations.get(update)
        return found.metrics if found else {}


def describe_unsaved(plan: Plan, fleet: Fleet, metrics: MetricsAggregator) -> str:
    """Return what an end at this moment means for the run, and what its instances do; callable from any thread."""
    newest, update = storage.latest_name(Path(plan.run_dir)), metrics.position
    if newest == storage.checkpoint_path(Path(), update).name:
        return f"the checkpoint of update {update} is written; the same command continues from it"
    now_s, doing = time.monotonic(), ""
    for index, (report, received_s) in sorted(fleet.heartbeats().items()):
        if report.activity != IDLE and now_s - received_s < _RECENT_S and not doing:
            doing = f" (instance {index}: {report.activity} for {report.duration_s + now_s - received_s:.0f} s)"
    state = f"update {update} is in no checkpoint" if update else "no update is done"
    return f"{state}{doing}; the same command continues from {newest or 'the beginning'}"


def _run_started(
    plan: Plan, started: List[InstanceStarted], fleet: Fleet, first_update: int, generation: int
) -> RunStarted:
    first = started[0]
    slowest: Dict[str, float] = {}
    for instance in started:
        for what, seconds in instance.seconds:
            slowest[what] = max(seconds, slowest.get(what, 0.0))
    steps = (*fleet.start_seconds, *((f"in the instances: {what}", value) for what, value in slowest.items()))
    facts = (first.device, first.device_line, first_update, first.parameters)
    return RunStarted(*facts, steps, generation, tuple(started), origin_of(plan))


class DiskWait:
    """The attempts to write one checkpoint. A requested stop ends the run without a further attempt."""

    def __init__(self, schedule: CheckpointSchedule, stop: Stop, limit_s: float) -> None:
        """`limit_s` is the time from the first failure to the end of the run."""
        self._schedule, self._stop, self._limit_s = schedule, stop, limit_s
        self._deadline_s: Optional[float] = None
        self._pause_s = _FIRST_PAUSE_S

    def save(self, fleet: Fleet, update: int) -> Iterator[Event]:
        """Write the state after `update` updates, unless that is begun, and wait until it is written.

        Raises:
            CheckpointNotSaved: it cannot be written within the time, or its error is not one of the disk.
        """
        yield PhaseBegun("saving", update)
        while True:
            yield from self._schedule.begin(fleet, update)
            for event in self._schedule.finish(fleet):
                if not isinstance(event, CheckpointFailed) or event.update != update:
                    yield event
                elif self._deadline_s is None and not self._stop.requested:
                    yield dataclasses.replace(event, waits_s=self._limit_s)
            if self._schedule.failed is None:
                return
            self._wait()

    def _wait(self) -> None:
        """Wait before the next attempt, each time longer. CheckpointNotSaved if the time is over."""
        now_s = time.monotonic()
        if self._deadline_s is None:
            self._deadline_s = now_s + self._limit_s
        if self._stop.requested or now_s >= self._deadline_s:
            raise self._schedule.not_saved(now_s - self._deadline_s + self._limit_s)
        ends_s = min(now_s + self._pause_s, self._deadline_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        while time.monotonic() < ends_s and not self._stop.requested:
            time.sleep(min(_POLL_S, max(0.0, ends_s - time.monotonic())))


class InstanceWarnings:
    """Yields each warning of a run once: an instance that replaces another one warns again."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._known: Set[str] = set()

    def new_in(self, reports: Sequence[Union[CallReport, EvaluationReport]]) -> Iterator[InstanceWarned]:
        """Yield the warnings of reports that no earlier report had."""
        for report in reports:
            for text in report.warnings:
                if text not in self._known:
                    self._known.add(text)
                    yield InstanceWarned(report.instance, text, self._plan.log_file(report.instance))


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
