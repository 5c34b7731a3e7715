"""Aggregation of reports to updates."""

from __future__ import annotations

import dataclasses
import math
import weakref
from typing import Callable, List

import pytest

from raypod.events import CallReport, EpochDone, UpdateDone
from raypod.plan.metric import ExactSum, Metric
from raypod.plan.plan import Plan
from raypod.runs.metrics import MetricsAggregator, RecentThroughput


def report(instance: int, losses: list[list[float]], correct: list[list[int]], first: int = 0) -> CallReport:
    """A report of mean losses and numbers of correct predictions, of 8 samples per replica and update."""
    rows = (zip(*each) for each in zip(losses, correct))
    return CallReport(instance, first, tuple(tuple((loss, 1.0, right, 8.0) for loss, right in row) for row in rows))


def test_an_update_is_emitted_once_all_instances_have_reported(make: Callable[..., Plan]) -> None:
    metrics = MetricsAggregator(make(), started_at_s=100.0)
    assert metrics.add(report(1, [[3.0, 4.0]], [[8, 8]]), 101.0) == []
    assert metrics.add(report(1, [[2.0, 2.0]], [[0, 0]], first=1), 101.5) == []  # an instance may be ahead
    (update,) = metrics.add(report(0, [[1.0, 2.0]], [[0, 8]]), 102.0)
    assert (update.update, update.epoch, update.loss, update.metrics["accuracy"]) == (1, 1, 2.5, 75.0)
    assert (update.samples, update.samples_per_s, update.time_s) == (32, 16.0, 2.0)
    assert [u.loss for u in metrics.add(report(0, [[4.0, 4.0]], [[0, 0]], first=1), 103.0)] == [3.0]


def test_a_call_of_several_updates_emits_each(make: Callable[..., Plan]) -> None:
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
    assert metrics.samples_per_s == 32.0
    assert metrics.first_update_s == 10.0
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


def test_the_points_to_which_a_run_can_return_are_bounded(make: Callable[..., Plan]) -> None:
    metrics = MetricsAggregator(make(), 0.0)
    for update in range(5000):
        metrics.know_epoch_sums(update, {})
    assert len(metrics._known_sums) == 1024


def test_an_epoch_keeps_no_updates(make: Callable[..., Plan]) -> None:
    metrics = MetricsAggregator(
        make(pod={"num_instances": 1, "replicas": 1}, data={"dataset": "synthetic", "samples": 80_000}), 0.0
    )
    refs = []
    for call in range(3):
        (update,) = metrics.add(report(0, [[float(call)]], [[8]], first=call), 1.0)
        refs.append(weakref.ref(update))
    del update
    assert [ref() is None for ref in refs] == [True, True, False]  # the last one is `metrics.last`
    assert metrics.end_epoch(0).metrics["loss"] == 1.0


# ---- the throughput over the most recent calls -----------------------------------------------------------------------


def test_reports_that_arrive_together_are_no_peak() -> None:
    recent = RecentThroughput()
    assert recent.per_s == 0.0
    rates = []
    for _ in range(20):  # calls of 0.25 s, whose reports come in pairs
        for elapsed_s in (0.4990234375, 0.0009765625):
            recent.add(8, elapsed_s)
            rates.append(recent.per_s)
    assert set(rates[4:]) == {32.0}


@pytest.mark.parametrize(("elapsed_s", "per_s"), [([0.25, 2.0, 4.0], 2.0), ([0.125] * 16 + [0.5] * 2, 16.0)])
def test_the_throughput_follows_a_change_within_a_second(elapsed_s: List[float], per_s: float) -> None:
    recent = RecentThroughput()
    for each_s in elapsed_s:
        recent.add(8, each_s)
    assert recent.per_s == per_s
