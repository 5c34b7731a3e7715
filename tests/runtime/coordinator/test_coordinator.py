"""The main loop with scripted fleets: instances, warnings, epochs, checkpoints at intervals, and waits for the disk."""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import sys
from types import FrameType, SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

import pytest

from raypod.errors import CheckpointNotSaved, ConfigError
from raypod.events import (
    CallReport,
    CheckpointFailed,
    CheckpointSaved,
    EpochDone,
    EvaluationDone,
    EvaluationReport,
    Event,
    InstanceWarned,
    RunEnded,
    SaveReport,
    UpdateDone,
)
from raypod.plan.plan import Plan, Segment
from raypod.runs.callback import Reporter
from raypod.runs.event_text import text_of
from raypod.runs.metrics import MetricsAggregator
from raypod.runtime.coordinator import checkpoint_schedule, coordinator
from raypod.runtime.coordinator.stop import Stop
from raypod.runtime.workers.scripted import ScriptedFleet
from raypod.training.checkpoint.format import Manifest
from raypod.training.checkpoint.resume import restart_point
from tests.support.saved_runs import save
from tests.support.scripted_runs import Breaks, broken, events_of, lost, of, only, updates_of

Make = Callable[..., Plan]


def plan_of(make: Make, instances: int) -> Plan:
    return make(training={"updates": 10, "batch_size": 1}, pod={"replicas": 2 * instances, "num_instances": instances})


def test_a_run_of_256_instances_yields_every_update_and_its_work_grows_no_faster(make: Make) -> None:
    plan = plan_of(make, 256)
    events = events_of(plan, ScriptedFleet(plan))
    assert updates_of(events) == list(range(1, 11))
    mean = sum(1 / (1 + instance) for instance in range(256)) / 256
    for event in of(events, UpdateDone):
        assert (event.loss, event.metrics["accuracy"]) == (pytest.approx(mean), pytest.approx(100 * mean))
    assert only(events, EvaluationDone).samples == 256
    assert not only(events[-1:], RunEnded).interrupted
    few, many = (instructions(plan_of(make, instances)) for instances in (16, 128))
    assert few < many <= 8 * few


@pytest.mark.parametrize(("usual", "expected"), [(700, 8 * 256), (5000, 5000), (0, 0)])
def test_the_garbage_of_many_reports_is_collected_together(make: Make, usual: int, expected: int) -> None:
    plan, before = plan_of(make, 256), gc.get_threshold()
    gc.set_threshold(usual, *before[1:])
    try:
        events = coordinator.run(plan, ScriptedFleet(plan), MetricsAggregator(plan, 0.0))
        assert {gc.get_threshold()[0] for _ in events} == {expected}
        assert gc.get_threshold() == (usual, *before[1:])
    finally:
        gc.set_threshold(*before)


def test_hosts_with_other_files_or_another_torch_are_an_error(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(make, 3)
    fleet = ScriptedFleet(plan)
    first, *others = fleet.start()
    other = dataclasses.replace(others[-1], host="another", sources="c")
    started = [dataclasses.replace(first, sources="a"), dataclasses.replace(others[0], sources="b"), other]
    monkeypatch.setattr(fleet, "start", lambda: started)  # instance 1 started on the same host, after an edit
    words = r"files on host another of instance 2 differ from .* \(sha256 c and a\); `raypod up FILE` copies the same"
    with pytest.raises(ConfigError, match=words):
        events_of(plan, fleet)
    versions = [dataclasses.replace(each, versions=(("torch", "2.13.0"),)) for each in (first, *others)]
    versions[-1] = dataclasses.replace(others[-1], host="another", versions=(("torch", "2.0.1"),))
    monkeypatch.setattr(fleet, "start", lambda: versions)
    with pytest.raises(ConfigError, match=r"instance 2 on host another has torch 2\.0\.1, and instance 0 on .* 2\.13"):
        events_of(plan, fleet)


def instructions(plan: Plan) -> int:
    """Count the bytecode instructions that the coordinator and its callees execute for a run."""
    counted = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal counted
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counted += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        events_of(plan, ScriptedFleet(plan))
    finally:
        sys.settrace(before)
    return counted


class Warns(ScriptedFleet):
    """Every call warns of the same, and the evaluation of something else."""

    def reports(self, update: int) -> List[CallReport]:
        first, *others = super().reports(update)
        return [dataclasses.replace(first, warnings=("UserWarning: the sizes differ",)), *others]

    def call(self, method: str, *arguments: Any) -> List[Any]:
        first, *others = super().call(method, *arguments)
        warnings = ("in the evaluation", "UserWarning: the sizes differ")
        return [dataclasses.replace(first, warnings=warnings) if method == "evaluate" else first, *others]


def test_each_warning_is_an_event_once_and_the_user_is_warned(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    plan = make(training={"epochs": 2})
    warned = of(events_of(plan, Warns(plan)), InstanceWarned)
    texts = ("UserWarning: the sizes differ", "in the evaluation")
    assert warned == [InstanceWarned(0, text, plan.log_file(0)) for text in texts]
    with caplog.at_level(logging.WARNING, "raypod"):
        Reporter().on_event(InstanceWarned(0, "UserWarning: x", "logs/instance-0.log"))
    assert caplog.messages == ["UserWarning: x (instance 0; its log: logs/instance-0.log)"]


class LoadsSlowly(ScriptedFleet):
    """Polls for a stop several times before the first call of a segment, which takes longer than the interval."""

    now_s, segments = 100.0, 0

    def run(self, segment: Segment, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        self.segments += 1
        assert self.segments < 50, "the run makes no progress"
        for _ in range(3):
            self.now_s += 30
            if stop_requested():
                return
        for report in super().run(segment, stop_requested):
            yield report
            self.now_s += 10


@pytest.mark.parametrize("resumed_at", [None, 2])
def test_data_slower_than_the_interval(make: Make, resumed_at: Optional[int], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make(training={"updates": 6}, pod={"num_instances": 2}, run={"checkpoint_every": "1 minute"})
    resumed = save(plan, resumed_at) if resumed_at else None
    if resumed:
        manifest = dataclasses.replace(resumed.manifest, weights_sha256="0" * 64)
        resumed = dataclasses.replace(resumed, manifest=manifest)
    fleet = LoadsSlowly(plan)
    monkeypatch.setattr(checkpoint_schedule, "time", SimpleNamespace(monotonic=lambda: fleet.now_s))
    events = events_of(plan, fleet, resumed=resumed)
    assert updates_of(events) == list(range(1 + (resumed_at or 0), 7))
    assert fleet.called.count("save") >= 2
    assert isinstance(events[-1], RunEnded)


WAY_ON = "`raypod lr-range` with the same flags suggests a learning rate"


class WithLosses(ScriptedFleet):
    """A fleet whose loss is a function of the update, and of the test split a number."""

    def __init__(self, plan: Plan, loss: Callable[[int], float], test_loss: float = 1.0) -> None:
        super().__init__(plan)
        self._loss, self._test_loss = loss, test_loss

    def call(self, method: str, *arguments: Any) -> List[Any]:
        if method != "evaluate":
            return super().call(method, *arguments)
        sums = (((self._test_loss,), (1.0,)), ((1.0,), (1.0,)))
        return [EvaluationReport(index, 1, (*sums[0], *sums[1])) for index in self._instances]

    def _report(self, instance: int, update: int) -> CallReport:
        of_replica = (self._loss(update + 1), 1.0, 1.0, 1.0)
        return CallReport(instance, update, ((of_replica,) * self._plan.geometry.local_replicas,))


def warned(make: Callable[..., Plan], loss: Callable[[int], float], test_loss: float = 1.0, **sections: Any) -> Any:
    """Return the updates and the warnings of a run of 40 updates, in their order."""
    training = {"updates": 40, "lr_schedule": "constant", "warmup_updates": 0, **sections.pop("training", {})}
    plan = make(training=training, **sections)
    return of(events_of(plan, WithLosses(plan, loss, test_loss)), (UpdateDone, InstanceWarned))  # type: ignore[arg-type]


def texts_of(events: List[Any]) -> Dict[int, str]:
    return {events[n - 1].update: each.text for n, each in enumerate(events) if isinstance(each, InstanceWarned)}


def test_a_loss_far_above_its_start_is_one_warning_that_names_update_and_rate(make: Callable[..., Plan]) -> None:
    events = warned(make, lambda update: 2.0 if update < 11 else 9.0, training={"learning_rate": 0.25})
    text = f"the loss is 9 at update 16 (learning rate 0.25), after 2 at the start: it diverges; {WAY_ON}"
    assert texts_of(events) == {16: text}
    event = next(each for each in events if isinstance(each, InstanceWarned))
    assert text_of({"event": "instance_warned", **vars(event)}) == f"instance warned: {text}"


LOSSES = [lambda n: 2.0 + n / 20, lambda n: 90.0 if n % 3 == 0 else 2.0, lambda n: n - 20.0, lambda n: 2.0 ** (n / 4)]


@pytest.mark.parametrize("loss", LOSSES)
def test_other_losses_and_a_range_test_of_the_rate_have_none(make: Make, loss: Callable[[int], float]) -> None:
    ranged = {"lr_schedule": "range-test"} if loss is LOSSES[-1] else {}
    assert texts_of(warned(make, loss, training=ranged)) == {}


def test_values_that_are_not_finite_name_their_consequence_once(make: Callable[..., Plan]) -> None:
    found = texts_of(warned(make, lambda n: math.nan if n > 6 else 1.0, run={"on_nonfinite": "continue"}))
    (text,) = found.values()
    assert list(found) == [7]
    assert text.startswith("the loss became nan at update 7 (learning rate ")
    assert text.endswith(f"); the run continues (--on-nonfinite continue); {WAY_ON}")
    training = {"evaluate_every": 1, "learning_rate": 0.25, "updates": 20}
    (text,) = texts_of(warned(make, lambda n: 1.0, math.nan, training=training)).values()
    assert text.startswith("loss is nan on the test split after update ")
    assert "(learning rate 0.25): no sample counts in it, or a value is not finite" in text


POINTS = [4, 8, 12, 16]


class Varies(Breaks):
    """Every replica has other sums in each update; `saved` has the manifests of the checkpoints."""

    def __init__(self, plan: Plan, *arguments: Any, **options: Any) -> None:
        super().__init__(plan, *arguments, **options)
        self.saved: Dict[int, Manifest] = {}
        self.weights = ""  # of the checkpoint that was loaded last

    def reports(self, update: int) -> List[CallReport]:
        found = []
        for report in super().reports(update):
            row = tuple(value / (3 + update) + report.instance for value in report.sums[0][0])
            found.append(dataclasses.replace(report, sums=((row,) * len(report.sums[0]),)))
        return found

    def call(self, method: str, *arguments: Any) -> List[Any]:
        if method == "save":
            self.saved.setdefault(arguments[0].update, arguments[0])
        results = super().call(method, *arguments)
        if method == "load_checkpoint":
            self.weights = arguments[1].manifest.weights_sha256
        return [self.weights or each for each in results] if method == "seed_weights" else results


def plan_of_two_epochs(make: Make) -> Plan:
    """2 epochs of 10 updates each."""
    training, pod = {"epochs": 2, "batch_size": 1}, {"replicas": 4, "num_instances": 2}
    data = {"dataset": "synthetic", "samples": 40}
    plan = make(training=training, pod=pod, data=data, run={"checkpoint_every": "4 updates"})
    assert plan.updates_per_epoch == 10
    return plan


def epochs_of(plan: Plan, fleet: Breaks, **options: Any) -> List[Tuple[int, Mapping[str, float]]]:
    return [(each.epoch, each.metrics) for each in of(events_of(plan, fleet, **options), EpochDone)]


def test_the_sums_of_a_checkpoint_are_those_of_its_epoch_until_then(make: Make) -> None:
    plan = plan_of_two_epochs(make)
    fleet = Varies(plan)
    epochs_of(plan, fleet)
    reports = {update: fleet.reports(update) for update in range(20)}
    for update in POINTS:
        rows = [row for each in range(update // 10 * 10, update) for one in reports[each] for row in one.sums[0]]
        for index, name in enumerate(("loss", "accuracy")):
            found = [sum(parts) for parts in fleet.saved[update].epoch_sums[name]]
            expected = [sum(row[2 * index + side] for row in rows) for side in (0, 1)]
            assert found == pytest.approx(expected)
    assert fleet.saved[20].epoch_sums == {}


@pytest.mark.parametrize("update", POINTS)
def test_an_epoch_has_the_same_metrics_after_a_resume(make: Make, update: int) -> None:
    plan = plan_of_two_epochs(make)
    undisturbed = Varies(plan)
    expected = epochs_of(plan, undisturbed)
    save(plan, update, epoch_sums=undisturbed.saved[update].epoch_sums)
    checkpoint, _ = restart_point(plan.run_dir, None)
    resumed = Varies(plan)
    assert epochs_of(plan, resumed, resumed=checkpoint) == expected[update // 10 :]
    for later in (each for each in POINTS if each > update):
        assert resumed.saved[later].epoch_sums == undisturbed.saved[later].epoch_sums


def test_a_checkpoint_without_sums_leaves_those_of_the_updates_after_it(make: Make) -> None:
    plan = plan_of_two_epochs(make)
    fleet = Varies(plan)
    (_, full), _ = epochs_of(plan, fleet)
    (_, rest), _ = epochs_of(plan, Varies(plan), resumed=save(plan, 4))
    assert rest["loss"] != full["loss"]
    rows = [row for update in range(4, 10) for one in fleet.reports(update) for row in one.sums[0]]
    assert rest["loss"] == pytest.approx(sum(row[0] for row in rows) / sum(row[1] for row in rows))


REPAIRS = [(6, (1,), {0: 6}), (6, (1,), {0: 4}), (13, (1,), {0: 12}), (13, (1,), {0: 8}), (7, (0, 1), {})]


@pytest.mark.parametrize(("fails_at", "lost_ones", "survivors"), REPAIRS)  # {}: from the checkpoint
def test_a_repair_restores_the_sums_of_its_state(make: Make, fails_at: int, lost_ones: Any, survivors: Any) -> None:
    plan = plan_of_two_epochs(make)
    undisturbed = Varies(plan)
    expected = epochs_of(plan, undisturbed)
    if not survivors:
        save(plan, 4, epoch_sums=undisturbed.saved[4].epoch_sums)  # of an earlier process
    fleet = Varies(plan, {(fails_at, 0): broken(*map(lost, lost_ones))}, repairs=[survivors])
    assert epochs_of(plan, fleet) == expected
    sums = [{update: each.epoch_sums for update, each in found.saved.items()} for found in (fleet, undisturbed)]
    assert sums[0] == sums[1]


UPDATE_S, WAIT_S = 60.0, 600.0


class DiskFills(ScriptedFleet):
    """Writes the checkpoints at `full_from_s` <= now_s < `space_at_s` not. An update takes a minute."""

    can_pass = True

    def __init__(self, plan: Plan, monkeypatch: pytest.MonkeyPatch, full_from_s: float, space_at_s: float) -> None:
        super().__init__(plan)
        self.now_s, self.waited_s, self._full = 0.0, 0.0, (full_from_s, space_at_s)
        self.on_sleep: Callable[[], object] = lambda: None
        clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self._sleep)
        monkeypatch.setattr(checkpoint_schedule, "time", clock)
        monkeypatch.setattr(coordinator, "time", clock)

    def _sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s, self.waited_s = self.now_s + seconds, self.waited_s + seconds
        self.on_sleep()

    def call(self, method: str, *arguments: Any) -> List[Any]:
        results = super().call(method, *arguments)
        if method == "save" and self._full[0] <= self.now_s < self._full[1]:
            update = arguments[0].update
            self._saves = (SaveReport(update, f"update-{update}", "", "no space", can_pass=self.can_pass),)
        elif method == "finish_saves":
            self._saves = ()
        return results

    def reports(self, update: int) -> List[CallReport]:
        first, *others = super().reports(update)
        self.now_s, saves, self._saves = self.now_s + UPDATE_S, self._saves, ()
        return [dataclasses.replace(first, saves=saves), *others]


def plan_with_retries(make: Make, **run: Any) -> Plan:
    run = {"checkpoint_every": "2 updates", "save_retry_s": WAIT_S, **run}
    return make(training={"updates": 20}, pod={"num_instances": 2}, run=run)


def ended_by(plan: Plan, fleet: ScriptedFleet, events: List[Event], stop: Optional[Stop] = None) -> CheckpointNotSaved:
    with pytest.raises(CheckpointNotSaved) as caught:
        events.extend(coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0), stop=stop))
    return caught.value


@pytest.mark.parametrize(("limit", "waits_at"), [("2 checkpoints", 7), ("3.5 minutes", 9), ("60 minutes", None)])
def test_max_unsaved_stops_it(make: Make, monkeypatch: pytest.MonkeyPatch, limit: str, waits_at: Optional[int]) -> None:
    plan = plan_with_retries(make, max_unsaved=limit)
    fleet = DiskFills(plan, monkeypatch, 200.0, 800.0)  # the checkpoint of update 2 is written, that of 4 is not
    events = events_of(plan, fleet)
    assert updates_of(events) == list(range(1, 21))
    waits = [(each.update, each.waits_s) for each in of(events, CheckpointFailed) if each.waits_s]
    assert (waits, fleet.waited_s > 100) == ([] if waits_at is None else [(waits_at, WAIT_S)], bool(waits))
    assert of(events, CheckpointSaved)[1].update == (waits_at or 14)  # with 60 minutes: the first after 800 s
    assert only(events, RunEnded).updates == 20


def test_a_disk_without_space_ends_the_run_after_a_stated_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, events = plan_with_retries(make, max_unsaved="1 checkpoint"), []  # type: ignore[var-annotated]
    fleet = DiskFills(plan, monkeypatch, 200.0, 1e9)
    error = ended_by(plan, fleet, events)
    assert (fleet.waited_s, updates_of(events)) == (pytest.approx(WAIT_S), [1, 2, 3, 4, 5])
    words = f"no space after {WAIT_S:.0f} s (--save-retry-s); once the disk can be written, continue from update-2"
    assert words in str(error)


def test_the_first_and_the_last_checkpoint_wait_for_the_disk(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_with_retries(make)
    fleet = DiskFills(plan, monkeypatch, 0.0, 500.0)
    events = events_of(plan, fleet)
    assert [each.update for each in of(events, CheckpointSaved)] == [3, *range(4, 21, 2)]
    last = DiskFills(plan, monkeypatch, 1200.0, 1500.0)
    events = events_of(plan, last)
    assert (of(events, CheckpointSaved)[-1].update, of(events, CheckpointFailed)[-1].waits_s) == (20, WAIT_S)


@pytest.mark.parametrize("can_pass", [True, False])
def test_no_wait_after_a_stop_or_without_hope(make: Make, monkeypatch: pytest.MonkeyPatch, can_pass: bool) -> None:
    plan, stop = plan_with_retries(make), Stop()
    fleet = DiskFills(plan, monkeypatch, 0.0, 1e9)
    fleet.on_sleep = lambda: stop.request("the user") if fleet.waited_s > 5 else None
    fleet.can_pass = can_pass
    words = "there is no earlier checkpoint" if can_pass else "so the run ends here"
    assert words in str(ended_by(plan, fleet, [], stop))
    assert fleet.waited_s < 10 if can_pass else not fleet.waited_s
