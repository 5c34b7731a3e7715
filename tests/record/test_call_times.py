from __future__ import annotations

from typing import Optional

import pytest

from raypod.events import CallDone, CallTimes, InstanceStarted, Repaired, RunEnded, RunStarted
from raypod.record.call_times import CallsByInstance, CallTimesLog, RecentCalls, cumulative_buckets


def call(first_update: int, *seconds: float, peer_wait_s: Optional[float] = 0.0) -> CallDone:
    times = tuple(CallTimes(index, each, each / 4, peer_wait_s) for index, each in enumerate(seconds))
    return CallDone(first_update, (), times)


def test_a_summary_has_the_quantiles_and_the_shares_of_the_recent_calls() -> None:
    calls = RecentCalls(kept=4)
    for seconds in (9.0, 1.0, 2.0, 3.0, 4.0):
        calls.add(CallTimes(0, seconds, seconds / 2, 0.5))
    assert calls.summary() == {
        "p50_s": 2.0,
        "p95_s": 4.0,
        "slowest_s": 9.0,
        "mean_s": 2.5,
        "busy_s": 2.0,
        "data_wait_share": 0.5,
        "peer_wait_share": 0.2,
    }


def test_an_unknown_wait_for_peers_counts_as_busy_time() -> None:
    calls = RecentCalls()
    calls.add(CallTimes(0, 2.0, 0.0, None))
    assert calls.summary()["busy_s"] == 2.0
    assert calls.summary()["peer_wait_share"] is None


def test_the_instance_that_does_not_wait_for_others_is_the_slow_one() -> None:
    calls = CallsByInstance()
    for _ in range(3):
        calls.handle(
            CallDone(0, (), (CallTimes(0, 1.0, 0.0, 0.6), CallTimes(1, 1.0, 0.0, 0.6), CallTimes(2, 1.0, 0, 0)))
        )
    ratios = [each["busy_ratio"] for each in calls.summaries().values()]
    assert ratios == pytest.approx([1.0, 1.0, 2.5])


def test_the_first_call_of_a_process_is_not_counted() -> None:
    calls = CallsByInstance()
    started = [_started(index) for index in range(2)]
    calls.handle(RunStarted("emulated", "", 0, 1, (), 1, tuple(started)))
    calls.handle(call(0, 30.0, 30.0))
    calls.handle(call(1, 1.0, 1.0))
    calls.handle(Repaired((1,), ("host",), "instance 0", 2, 1.0, 1, 2))
    calls.handle(call(2, 1.0, 30.0))
    calls.handle(call(3, 1.0, 1.0))
    assert [(each.calls, each.slowest_s) for each in calls.by_instance().values()] == [(3, 1.0), (2, 1.0)]


def test_buckets_count_all_calls_up_to_their_bound() -> None:
    calls = RecentCalls()
    for seconds in (0.001, 0.002, 0.3, 1000.0):
        calls.add(CallTimes(0, seconds, 0.0, 0.0))
    found = dict(cumulative_buckets(calls.buckets))
    assert (found[0.001], found[0.0025], found[0.25], found[0.5], found[300.0], found[float("inf")]) == (
        1,
        2,
        2,
        3,
        3,
        4,
    )


def test_a_window_ends_after_ten_seconds_and_at_the_end_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("raypod.record.call_times.time.monotonic", lambda: now[0])
    log = CallTimesLog()
    now[0] += 60  # a slow start is no window
    assert log.handle(RunStarted("emulated", "", 0, 1, (), 1, ())) is None
    assert log.handle(call(0, 1.0)) is None
    now[0] += 10
    record = log.handle(call(1, 3.0))
    assert record is not None
    assert (record["first_update"], record["calls"], record["window_s"]) == (0, 2, 10.0)
    assert record["instances"][0]["mean_s"] == 2.0
    assert log.handle(call(2, 5.0)) is None
    record = log.handle(RunEnded(3, False, "", None))
    assert record is not None
    assert (record["first_update"], record["calls"], record["instances"][0]["mean_s"]) == (2, 1, 5.0)
    assert log.end_window() is None


def test_the_number_of_windows_grows_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("raypod.record.call_times.time.monotonic", lambda: now[0])
    log, records = CallTimesLog(), 0
    for update in range(7 * 24 * 360):  # a call every 10 seconds for a week
        now[0] += 10
        records += log.handle(call(update, 10.0)) is not None
    assert 300 < records < 1000


def _started(index: int) -> InstanceStarted:
    return InstanceStarted(index, "host", 1, "emulated", "", 1, ())


def test_many_instances_keep_fewer_calls_each() -> None:
    calls = CallsByInstance(kept=1024)
    calls.handle(RunStarted("emulated", "", 0, 1, (), 1, tuple(_started(index) for index in range(4096))))
    for number in range(200):
        calls.handle(CallDone(number, (), (CallTimes(7, float(number), 0.0, 0.0),)))
    summary = calls.summaries()[7]
    assert calls.by_instance()[7].calls == 199  # without the first one, which compiles
    assert summary["mean_s"] == sum(range(136, 200)) / 64  # 2 ** 18 / 4096 = 64
    assert summary["slowest_s"] == 199
