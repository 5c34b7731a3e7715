"""Aggregation of reports to updates, call times, the metrics file, and the TensorBoard event files."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import itertools
import json
import math
import weakref
from pathlib import Path
from typing import Any, Callable, Iterable, List

import pytest

from raypod import train
from raypod.events import (
    CallDone,
    CallReport,
    CallTimes,
    EpochDone,
    EvaluationDone,
    InstanceStarted,
    Repaired,
    RunEnded,
    RunStarted,
    UpdateDone,
)
from raypod.plan.metric import ExactSum, Metric
from raypod.plan.plan import Plan
from raypod.runs.call_times import BUCKETS_S, CallsByInstance, CallTimesLog, RecentCalls
from raypod.runs.metrics import MetricsAggregator, RecentThroughput, events_in, flat, line_of
from raypod.runs.run_folder import last_update
from raypod.runs.sinks import JsonLines, LatestDetails, TensorBoardWriter
from tests.support.event_files import scalars
from tests.support.faulty_disks import FullDisk


def report(instance: int, losses: list[list[float]], correct: list[list[int]], first: int = 0) -> CallReport:
    """A report of mean losses and numbers of correct predictions, of 8 samples per replica and update."""
    rows = (zip(*each) for each in zip(losses, correct))
    return CallReport(instance, first, tuple(tuple((loss, 1.0, right, 8.0) for loss, right in row) for row in rows))


def test_an_update_is_emitted_once_all_instances_have_reported(make: Callable[..., Plan]) -> None:
    metrics = MetricsAggregator(make(), started_at_s=100.0)
    assert metrics.add(report(1, [[3.0, 4.0]], [[8, 8]]), 101.0) == []
    assert metrics.add(report(1, [[2.0, 2.0]], [[0, 0]], first=1), 101.5) == []  # an instance may be ahead
    (done,) = metrics.add(report(0, [[1.0, 2.0]], [[0, 8]]), 102.0)
    assert (done.update, done.epoch, done.loss, done.metrics["accuracy"]) == (1, 1, 2.5, 75.0)
    assert (done.samples, done.samples_per_s, done.time_s) == (32, 16.0, 2.0)
    assert [u.loss for u in metrics.add(report(0, [[4.0, 4.0]], [[0, 0]], first=1), 103.0)] == [3.0]
    metrics = MetricsAggregator(make(training={"device_iterations": 2}, pod={"num_instances": 1, "replicas": 1}), 0.0)
    updates = metrics.add(report(0, [[1.0], [3.0]], [[8], [4]]), 1.0)
    assert [(u.update, u.loss, u.metrics["accuracy"]) for u in updates] == [(1, 1.0, 100.0), (2, 3.0, 50.0)]
    assert metrics.end_epoch(0).metrics["loss"] == 2.0


@pytest.mark.parametrize("instances", [1, 2, 4])
def test_the_loss_does_not_depend_on_the_placement(make: Callable[..., Plan], instances: int) -> None:
    losses = [0.1, 0.7, 1e-9, 3.3]
    metrics, local = MetricsAggregator(make(pod={"num_instances": instances}), 0.0), 4 // instances
    done: List[UpdateDone] = []
    for index in reversed(range(instances)):
        part = losses[index * local : (index + 1) * local]
        done += metrics.add(report(index, [part], [[1] * local]), 1.0)
    assert done[0].loss == 1.02500000025


def test_throughput_excludes_the_first_call_and_pauses(make: Callable[..., Plan]) -> None:
    metrics = MetricsAggregator(make(pod={"num_instances": 1}), 0.0)
    metrics.begin_segment(5.0)
    for call, now in enumerate((10.0, 11.0)):  # the first call takes 5 s: it includes the compilation
        metrics.add(report(0, [[1.0] * 4], [[0] * 4], first=call), now)
    metrics.begin_segment(50.0)  # after an evaluation
    metrics.add(report(0, [[1.0] * 4], [[0] * 4], first=2), 51.0)
    assert (metrics.samples_per_s, metrics.first_update_s) == (32.0, 10.0)
    metrics = MetricsAggregator(make(pod={"num_instances": 1}), 0.0)
    done = [metrics.add(report(0, [[1.0] * 4], [[0] * 4], call), now)[0] for call, now in enumerate((10.0, 10.25))]
    assert [each.samples_per_s for each in done] == [3.2, 128.0], "nor does it count for the next ones"


def test_the_wait_for_data_is_a_share_of_the_time_of_the_calls(make: Callable[..., Plan]) -> None:
    metrics = MetricsAggregator(make(), 0.0)
    for call, (wait_s, call_s) in enumerate(((9.0, 10.0), (0.5, 2.0), (0.0, 3.0))):  # the first call is excluded
        for instance in range(2):
            one = report(instance, [[1.0] * 2], [[0] * 2], call)
            done = metrics.add(dataclasses.replace(one, data_wait_s=wait_s, call_s=call_s), float(call))
        assert done[0].data_wait_share == wait_s / call_s
    assert metrics.data_wait_share == 0.1


def test_after_a_repair_every_update_is_emitted_once(make: Callable[..., Plan]) -> None:
    metrics = MetricsAggregator(make(), 0.0)
    for instance in (0, 1):
        metrics.add(report(instance, [[1.0, 1.0]], [[8, 8]]), 1.0)
    metrics.add(report(0, [[2.0, 4.0]], [[8, 4]], first=1), 2.0)  # instance 1 was lost before it reported
    metrics.add(report(1, [[9.0, 9.0]], [[0, 0]], first=2), 2.0)  # instance 0 has not done this call
    assert metrics.missing_reports(2) == [(1, 1)]
    metrics.add_lost_reports([report(1, [[6.0, 8.0]], [[0, 4]], first=1)])
    (pending,) = metrics.rollback_to(2, 3.0)
    assert (pending.update, pending.loss, pending.metrics["accuracy"], pending.missing_reports) == (2, 5.0, 50.0, ())
    assert metrics.position == 2
    for instance in (0, 1):
        done = metrics.add(report(instance, [[5.0, 5.0]], [[8, 8]], first=2), 4.0)
    assert [(each.update, each.loss) for each in done] == [(3, 5.0)]
    assert [call.first_update for call in metrics.take_calls()] == [0, 1, 2]


def test_an_update_without_the_report_of_an_instance_has_no_results(make: Callable[..., Plan]) -> None:
    metrics = MetricsAggregator(make(), 0.0)
    for instance in (0, 1):
        metrics.add(report(instance, [[1.0, 3.0]], [[8, 0]]), 1.0)
    metrics.add(report(0, [[2.0, 4.0]], [[8, 4]], first=1), 2.0)
    partial, unreported = metrics.rollback_to(3, 3.0)
    assert (partial.update, unreported.update) == (2, 3)
    assert (partial.missing_reports, unreported.missing_reports) == ((1,), (0, 1))
    for each in (partial, unreported):
        assert not each.has_results
        assert math.isnan(each.loss)
        assert math.isnan(each.metrics["accuracy"])
    assert [call.first_update for call in metrics.take_calls()] == [0, 1, 2]
    assert metrics.end_epoch(0) == EpochDone(1, {"loss": 2.0, "accuracy": 50.0})  # of the update that has results
    assert math.isnan(metrics.end_epoch(1).metrics["loss"])


def test_after_a_rollback_no_update_is_emitted_again(make: Callable[..., Plan]) -> None:
    metrics = MetricsAggregator(make(pod={"num_instances": 1}), 0.0)
    for first in (0, 1, 2):
        metrics.add(report(0, [[1.0] * 4], [[8] * 4], first=first), 1.0)
    assert metrics.rollback_to(1, 2.0) == []
    assert (metrics.position, metrics.last and metrics.last.update) == (1, 3)
    emitted = [metrics.add(report(0, [[1.0] * 4], [[8] * 4], first=first), 3.0) for first in (1, 2, 3)]
    assert [[each.update for each in updates] for updates in emitted] == [[], [], [4]]
    assert metrics.position == 4


def test_the_sum_of_an_epoch_is_exact_and_its_memory_bounded() -> None:
    total, values = ExactSum(), []
    assert total.value == 0.0
    for number in range(5000):
        values.append((-1.0) ** number * 10.0 ** (number % 40 - 20))
        total.add(values[-1])
        assert len(total._parts) <= 1024
    assert total.value == ExactSum(total.parts).value == math.fsum(values)
    total.add(math.inf)
    assert total.value == math.inf
    for _ in range(1024):
        total.add(-math.inf)
    assert math.isnan(total.value)


def test_the_metrics_of_an_epoch_are_ratios_of_sums(make: Callable[..., Plan]) -> None:
    plan = make(pod={"num_instances": 1, "replicas": 1})
    loss, perplexity = plan.task.metrics[0], Metric("perplexity", transform=math.exp)
    plan = dataclasses.replace(plan, task=dataclasses.replace(plan.task, metrics=(loss, perplexity)))
    metrics = MetricsAggregator(plan, 0.0)
    for update, value in enumerate((6.0, 3.0)):
        metrics.add(CallReport(0, update, (((value, 1.0, value, 1.0),),)), 1.0)
    assert metrics.end_epoch(0).metrics == {"loss": 4.5, "perplexity": math.exp(4.5)}


def test_the_points_to_which_a_run_can_return_are_bounded_and_an_epoch_keeps_no_updates(make: Any) -> None:
    metrics = MetricsAggregator(make(), 0.0)
    for number in range(5000):
        metrics.know_epoch_sums(number, {})
    assert len(metrics._known_sums) == 1024
    data = {"dataset": "synthetic", "samples": 80_000}
    metrics = MetricsAggregator(make(pod={"num_instances": 1, "replicas": 1}, data=data), 0.0)
    refs = []
    for number in range(3):
        (done,) = metrics.add(report(0, [[float(number)]], [[8]], first=number), 1.0)
        refs.append(weakref.ref(done))
    del done
    assert [ref() is None for ref in refs] == [True, True, False]  # the last one is `metrics.last`
    assert metrics.end_epoch(0).metrics["loss"] == 1.0


@pytest.mark.parametrize(("elapsed_s", "per_s"), [([0.25, 2.0, 4.0], 2.0), ([0.125] * 16 + [0.5] * 2, 16.0)])
def test_the_throughput_follows_a_change_within_a_second(elapsed_s: List[float], per_s: float) -> None:
    recent = RecentThroughput()
    assert recent.per_s == 0.0
    for each_s in elapsed_s:
        recent.add(8, each_s)
    assert recent.per_s == per_s
    recent, rates = RecentThroughput(), []
    for each_s in (0.4990234375, 0.0009765625) * 20:  # calls of 0.25 s, whose reports come in pairs: no peaks
        recent.add(8, each_s)
        rates.append(recent.per_s)
    assert set(rates[4:]) == {32.0}


def call(first_update: int, *seconds: float) -> CallDone:
    times = (CallTimes(index, each, each / 4, 0.0) for index, each in enumerate(seconds))
    return CallDone(first_update, (), tuple(times))


def started(instances: int) -> RunStarted:
    found = (InstanceStarted(index, "host", 1, "emulated", "", 1, ()) for index in range(instances))
    return RunStarted("emulated", "", 0, 1, (), 1, tuple(found))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> List[float]:
    found = [1000.0]
    monkeypatch.setattr("raypod.runs.call_times.time.monotonic", lambda: found[0])
    return found


def test_a_summary_has_the_quantiles_shares_and_buckets_of_the_recent_calls() -> None:
    calls = RecentCalls(kept=4)
    for seconds in (9.0, 1.0, 2.0, 3.0, 4.0):
        calls.add(CallTimes(0, seconds, seconds / 2, 0.5))
    shares = {"busy_s": 2.0, "data_wait_share": 0.5, "peer_wait_share": 0.2}
    assert calls.summary() == {"p50_s": 2.0, "p95_s": 4.0, "slowest_s": 9.0, "mean_s": 2.5, **shares}
    calls = RecentCalls()
    calls.add(CallTimes(0, 2.0, 0.0, None))  # an unknown wait for peers counts as busy time
    assert (calls.summary()["busy_s"], calls.summary()["peer_wait_share"]) == (2.0, None)
    calls = RecentCalls()
    for seconds in (0.001, 0.002, 0.3, 1000.0):
        calls.add(CallTimes(0, seconds, 0.0, 0.0))
    found = dict(zip((*BUCKETS_S, math.inf), itertools.accumulate(calls.buckets)))
    assert [found[bound] for bound in (0.001, 0.0025, 0.25, 0.5, 300.0, float("inf"))] == [1, 2, 2, 3, 3, 4]


def test_the_slow_instance_waits_for_no_other_and_first_calls_do_not_count() -> None:
    calls = CallsByInstance()
    for _ in range(3):
        times = tuple(CallTimes(index, 1.0, 0.0, wait_s) for index, wait_s in enumerate((0.6, 0.6, 0.0)))
        calls.handle(CallDone(0, (), times))
    ratios = [each["busy_ratio"] for each in calls.summaries().values()]
    assert ratios == pytest.approx([1.0, 1.0, 2.5])
    calls = CallsByInstance()
    calls.handle(started(2))
    calls.handle(call(0, 30.0, 30.0))
    calls.handle(call(1, 1.0, 1.0))
    calls.handle(Repaired((1,), ("host",), "instance 0", 2, 1.0, 1, 2))
    calls.handle(call(2, 1.0, 30.0))
    calls.handle(call(3, 1.0, 1.0))
    assert [(each.calls, each.slowest_s) for each in calls.by_instance().values()] == [(3, 1.0), (2, 1.0)]


def test_a_window_ends_after_ten_seconds_and_at_the_end_of_the_run(now: List[float]) -> None:
    log = CallTimesLog()
    now[0] += 60  # a slow start is no window
    assert log.handle(started(0)) is None
    assert log.handle(call(0, 1.0)) is None
    now[0] += 10
    record: Any = log.handle(call(1, 3.0))
    assert (record["first_update"], record["calls"], record["window_s"]) == (0, 2, 10.0)
    assert record["instances"][0]["mean_s"] == 2.0
    assert log.handle(call(2, 5.0)) is None
    record = log.handle(RunEnded(3, False, "", None))
    assert (record["first_update"], record["calls"], record["instances"][0]["mean_s"]) == (2, 1, 5.0)
    assert log.end_window() is None


def test_the_number_of_windows_grows_slowly_and_many_instances_keep_fewer_calls_and_events(now: List[float]) -> None:
    log, records = CallTimesLog(), 0
    for number in range(7 * 24 * 360):  # a call every 10 seconds for a week
        now[0] += 10
        records += log.handle(call(number, 10.0)) is not None
    assert 300 < records < 1000
    calls = CallsByInstance(kept=1024)
    calls.handle(started(4096))
    for number in range(200):
        calls.handle(CallDone(number, (), (CallTimes(7, float(number), 0.0, 0.0),)))
    summary = calls.summaries()[7]
    assert calls.by_instance()[7].calls == 199  # without the first one, which compiles
    assert summary["mean_s"] == sum(range(136, 200)) / 64  # 2 ** 18 / 4096 = 64
    assert summary["slowest_s"] == 199
    calls.handle(call(200, *[1.0] * 8192))
    assert not calls._collected


FLAGS = ["--fleet", "inline", "--device", "emulated", "--lr-schedule", "constant", "--model", "tiny", "--tensorboard"]


def update(number: int, loss: float = 0.5) -> UpdateDone:
    return UpdateDone(number, 7, {"loss": loss, "accuracy": 75.0}, 32 * number, 1000.0, 2.0)


@pytest.fixture(autouse=True)
def ordered_event_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Number the event files of a test from 0: TensorBoard reads them by name, 10 before 9."""
    files = importlib.import_module("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(files, "_global_uid", files.AtomicCounter(0))


def write(path: Path, resumed_from: int, numbers: Iterable[int]) -> None:
    lines = JsonLines(path, UpdateDone, resumed_from)
    for number in numbers:
        lines.on_event(update(number))
    lines.close()


def test_lines_of_an_earlier_version_have_no_learning_rate_and_are_read() -> None:
    old = flat(update(3))
    assert not {"learning_rate", "metrics"} & set(old)
    assert events_in(UpdateDone, [old, {"update": 4}, {**old, "metrics": 3}]) == [update(3)]
    new = dataclasses.replace(update(3), learning_rate=0.1, loss_scaling=8.0, norms={"grad_norm": 0.5})
    new = dataclasses.replace(new, part_rates={"tokens_per_s": 9.0}, metrics={"loss": 0.5, "steps_per_s": 2.0})
    line = line_of(new)
    assert (line["metrics"], line["loss"], line["grad_norm"]) == (new.metrics, 0.5, 0.5)
    for each in (line, {name: value for name, value in line.items() if name not in new.metrics}):
        assert events_in(UpdateDone, [each]) == [new], "also without the metrics at the top level"


def updates_in(path: Path) -> List[int]:
    return [json.loads(text)["update"] for text in path.read_text().splitlines()]


@pytest.mark.parametrize("left", ['{"update": 4, "los', '{"update": 3, "loss": 1.0}'], ids=["truncated", "no newline"])
def test_a_resumed_run_has_no_duplicate_lines_and_ends_the_last_one(tmp_path: Path, left: str) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, (1, 2))
    line = json.loads(path.read_text().splitlines()[0])
    assert list(line)[:7] == ["update", "epoch", "loss", "accuracy", "samples", "samples_per_s", "time_s"]
    assert line["data_wait_share"] == 0
    with path.open("a") as file:
        file.write(left)
    resumed_from = 3 if left.endswith("}") else 1
    write(path, resumed_from, (resumed_from + 1, 5))
    assert updates_in(path) == [*range(1, resumed_from + 2), 5]


def test_a_resume_reads_the_end_of_the_metrics_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, parsed, loads = tmp_path / "metrics.jsonl", [], json.loads
    write(path, 0, range(1, 1001))
    before = path.stat().st_ino
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or loads(text))
    write(path, 1000, ())
    assert (path.stat().st_ino, len(parsed)) == (before, 1)  # nothing to remove, so the file stays
    write(path, 990, ())
    newest = last_update(tmp_path)
    assert (newest and newest.update, len(parsed)) == (990, 1 + 11 + 1)
    assert updates_in(path) == list(range(1, 991))


def test_unknown_results_are_null_with_the_instances_whose_report_is_missing(tmp_path: Path) -> None:
    unknown = dataclasses.replace(update(1), metrics={"loss": math.nan, "accuracy": math.nan}, missing_reports=(1, 3))
    lines, writer = JsonLines(tmp_path / "metrics.jsonl", UpdateDone, 0), TensorBoardWriter(tmp_path, 0)
    for sink in (lines, writer):
        sink.on_event(unknown)
        sink.close()
    found = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (found["loss"], found["accuracy"], found["missing_reports"]) == (None, None, [1, 3])
    assert scalars(tmp_path) == {"training/samples_per_s": [(1, 1000.0)]}


def test_updates_and_evaluations_become_scalars_once_after_a_resume(tmp_path: Path) -> None:
    for begun, numbers in ((0, (300, 301, 302)), (300, (301,))):
        writer = TensorBoardWriter(tmp_path, begun)
        for number in numbers:
            writer.on_event(update(number))
            writer.on_event(EvaluationDone(360, {"loss": 0.25, "accuracy": 99.0}, number, 7))
        writer.close()
    values = {"training/loss": 0.5, "training/accuracy": 75.0, "training/samples_per_s": 1000.0}
    values.update({"test/loss": 0.25, "test/accuracy": 99.0})
    assert scalars(tmp_path) == {tag: [(300, value), (301, value)] for tag, value in values.items()}


@pytest.mark.parametrize("is_written", [True, False])
def test_updates_that_are_computed_again_replace_those_of_before(tmp_path: Path, is_written: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    lines, writer = JsonLines(path, UpdateDone, 0), TensorBoardWriter(tmp_path, 0)
    for sink in (lines, writer):
        for number in range(1, 5):
            sink.on_event(update(number, loss=1.0))
        if is_written:
            sink.sync()
        for _ in range(2):
            sink.drop_after(2)
        for number in range(3, 6):
            sink.on_event(update(number, loss=2.0))
        sink.close()
    expected = [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    assert [(each["update"], each["loss"]) for each in map(json.loads, path.read_text().splitlines())] == expected
    assert scalars(tmp_path)["training/loss"] == expected


def test_lines_that_a_full_disk_keeps_from_being_dropped_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, disk, warnings = tmp_path / "metrics.jsonl", FullDisk(monkeypatch), []  # type: ignore[var-annotated]
    lines = JsonLines(path, UpdateDone, 0)
    for number in (1, 2, 3):
        lines.on_event(update(number))
    disk.free_bytes = 0
    lines.drop_after(1)  # the first line cannot be copied
    lines.on_event(update(2))
    lines.drop_after(1)
    disk.free_bytes = None
    lines.close()
    assert (updates_in(path), [each.name for each in tmp_path.iterdir()]) == ([1, 2, 3, 2], ["metrics.jsonl"])
    lines = JsonLines(tmp_path / "other.jsonl", UpdateDone, 0, warnings.append)
    for number in (1, 2):
        lines.on_event(update(number))
    lines.drop_after(1)
    disk.free_bytes = 0  # after lines were dropped
    lines.on_event(update(2))
    disk.free_bytes = None
    lines.close()
    assert len(warnings) == 1, warnings
    assert "other.jsonl" in warnings[0]


def test_the_details_of_an_evaluation_of_abandoned_weights_are_removed(tmp_path: Path) -> None:
    details = LatestDetails(tmp_path, 0, lambda text: None)
    details.on_event(EvaluationDone(10, {}, 6, 1, {"classes": []}))
    LatestDetails(tmp_path, 6, lambda text: None).drop_after(6)
    assert json.loads((tmp_path / "test.json").read_text())["update"] == 6
    details.drop_after(5)
    assert not (tmp_path / "test.json").exists()


def test_points_of_a_full_disk_are_written_once_there_is_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("torch.utils.tensorboard")
    is_full = False

    class FullDisk(module.SummaryWriter):  # type: ignore[misc, name-defined]
        def flush(self) -> None:
            if is_full:
                self.close()
                raise OSError("no space left on device")
            super().flush()

    monkeypatch.setattr(module, "SummaryWriter", FullDisk)
    writer = TensorBoardWriter(tmp_path, 0)
    for number in range(1, 7):
        is_full = 2 <= number < 5
        writer.on_event(update(number, loss=float(number)))
        writer.sync()
    writer.close()
    assert scalars(tmp_path)["training/loss"] == [(number, float(number)) for number in range(1, 7)]


def test_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find_spec = importlib.util.find_spec

    def without_tensorboard(name: str, package: Any = None) -> Any:
        return None if name == "tensorboard" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_tensorboard)
    assert train.main([*FLAGS, "--updates", "2", "--run-dir", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--tensorboard needs the package tensorboard" in line
    assert line.endswith("pip install 'raypod[tensorboard]'")
    assert not (tmp_path / "run").exists()
