from __future__ import annotations

from typing import List

import pytest

from raypod.events import CallDone, CallTimes, InstanceStarted, Repaired, RunEnded, RunStarted
from raypod.runs.call_times import CallsByInstance, CallTimesLog, RecentCalls, cumulative_buckets


def call(first_update: int, *seconds: float) -> CallDone:
    return CallDone(
        first_update, (), tuple(CallTimes(index, each, each / 4, 0.0) for index, each in enumerate(seconds))
    )


def started(instances: int) -> RunStarted:
    found = (InstanceStarted(index, "host", 1, "emulated", "", 1, ()) for index in range(instances))
    return RunStarted("emulated", "", 0, 1, (), 1, tuple(found))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> List[float]:
    """The time, which a test changes."""
    found = [1000.0]
    monkeypatch.setattr("raypod.runs.call_times.time.monotonic", lambda: found[0])
    return found


def test_a_summary_has_the_quantiles_and_the_shares_of_the_recent_calls() -> None:
    calls = RecentCalls(kept=4)
    for seconds in (9.0, 1.0, 2.0, 3.0, 4.0):
        calls.add(CallTimes(0, seconds, seconds / 2, 0.5))
    shares = {"busy_s": 2.0, "data_wait_share": 0.5, "peer_wait_share": 0.2}
    assert calls.summary() == {"p50_s": 2.0, "p95_s": 4.0, "slowest_s": 9.0, "mean_s": 2.5, **shares}
    calls = RecentCalls()
    calls.add(CallTimes(0, 2.0, 0.0, None))  # an unknown wait for peers counts as busy time
    assert (calls.summary()["busy_s"], calls.summary()["peer_wait_share"]) == (2.0, None)


def test_the_instance_that_does_not_wait_for_others_is_the_slow_one() -> None:
    calls = CallsByInstance()
    for _ in range(3):
        times = tuple(CallTimes(index, 1.0, 0.0, wait_s) for index, wait_s in enumerate((0.6, 0.6, 0.0)))
        calls.handle(CallDone(0, (), times))
    ratios = [each["busy_ratio"] for each in calls.summaries().values()]
    assert ratios == pytest.approx([1.0, 1.0, 2.5])


def test_the_first_call_of_a_process_is_not_counted() -> None:
    calls = CallsByInstance()
    calls.handle(started(2))
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
    assert [found[bound] for bound in (0.001, 0.0025, 0.25, 0.5, 300.0, float("inf"))] == [1, 2, 2, 3, 3, 4]


def test_a_window_ends_after_ten_seconds_and_at_the_end_of_the_run(now: List[float]) -> None:
    log = CallTimesLog()
    now[0] += 60  # a slow start is no window
    assert log.handle(started(0)) is None
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


def test_the_number_of_windows_grows_slowly(now: List[float]) -> None:
    log, records = CallTimesLog(), 0
    for update in range(7 * 24 * 360):  # a call every 10 seconds for a week
        now[0] += 10
        records += log.handle(call(update, 10.0)) is not None
    assert 300 < records < 1000


def test_many_instances_keep_fewer_calls_each() -> None:
    calls = CallsByInstance(kept=1024)
    calls.handle(started(4096))
    for number in range(200):
        calls.handle(CallDone(number, (), (CallTimes(7, float(number), 0.0, 0.0),)))
    summary = calls.summaries()[7]
    assert calls.by_instance()[7].calls == 199  # without the first one, which compiles
    assert summary["mean_s"] == sum(range(136, 200)) / 64  # 2 ** 18 / 4096 = 64
    assert summary["slowest_s"] == 199
