"""The throughput over the most recent calls."""

from __future__ import annotations

from typing import Callable

from raypod.events import CallReport
from raypod.plan.plan import Plan
from raypod.record.metrics import MetricsAggregator
from raypod.record.throughput import RecentThroughput


def test_reports_that_arrive_together_are_no_peak() -> None:
    recent = RecentThroughput()
    assert recent.per_s == 0.0
    rates = []
    for _ in range(20):  # calls of 0.25 s, whose reports come in pairs
        for elapsed_s in (0.4990234375, 0.0009765625):
            recent.add(8, elapsed_s)
            rates.append(recent.per_s)
    assert set(rates[4:]) == {32.0}


def test_a_call_of_a_second_and_more_is_its_own_throughput() -> None:
    recent = RecentThroughput()
    for elapsed_s in (0.25, 2.0, 4.0):
        recent.add(8, elapsed_s)
    assert recent.per_s == 2.0


def test_the_throughput_follows_a_change_within_a_second() -> None:
    recent = RecentThroughput()
    for elapsed_s in [0.125] * 16 + [0.5] * 2:
        recent.add(8, elapsed_s)
    assert recent.per_s == 16.0


def test_the_first_call_does_not_count_for_the_next_ones(make: Callable[..., Plan]) -> None:
    metrics = MetricsAggregator(make(pod={"num_instances": 1}), 0.0)
    sums = (((1.0, 1.0, 0.0, 8.0),) * 4,)  # of 4 replicas with 8 samples each
    updates = [metrics.add(CallReport(0, call, sums), now)[0] for call, now in enumerate((10.0, 10.25))]
    assert [each.samples_per_s for each in updates] == [3.2, 128.0]
