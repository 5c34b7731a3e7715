"""Which instances are considered silent or stuck."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional

import pytest

from raypod.events import HeartbeatReport
from raypod.plan.sections import RunSection
from raypod.runtime.worker.control import ATTACHING, IDLE, LOADING, RETRYING, SNAPSHOT
from raypod.runtime.workers.liveness import BUSY_FACTOR, LastHeartbeat, Suspect, find_suspects, find_unreleased

NOW_S = 1000.0
IN_CALL = "in call 7"


def report(
    instance: int, activity: str, duration_s: float, waits: bool = False, calls: int = 6, slowest: Optional[float] = 2.0
) -> HeartbeatReport:
    return HeartbeatReport(instance, activity, duration_s, calls, slowest, waits)


def suspects(*reports: HeartbeatReport, **bounds: Any) -> List[Suspect]:
    heartbeats: Dict[int, LastHeartbeat] = {each.instance: LastHeartbeat(each, NOW_S - 1) for each in reports}
    return find_suspects(heartbeats, NOW_S, RunSection(**bounds))


def stuck(*reports: HeartbeatReport, **bounds: Any) -> List[int]:
    return [suspect.instance for suspect in suspects(*reports, **bounds)]


def test_a_silent_instance_is_a_suspect_and_its_last_activity_is_named() -> None:
    assert not suspects(report(0, IN_CALL, 29.0), report(1, LOADING, 29.0))
    assert not suspects(report(0, IDLE, 5000.0), report(1, "save", 5000.0))  # they have their own timeouts
    waits = LastHeartbeat(report(0, IN_CALL, 1.0, waits=True), NOW_S - 1)
    heartbeats = {0: waits, 1: LastHeartbeat(report(1, LOADING, 1.0), NOW_S - 16)}
    (suspect,) = find_suspects(heartbeats, NOW_S, RunSection())
    assert (suspect.instance, suspect.kind) == (1, "silent")
    assert suspect.cause.startswith("silent for 16.0 s (run.silent_after_s = 15)")
    assert suspect.cause.endswith("it was loading data")
    assert not find_suspects(heartbeats, NOW_S, RunSection(silent_after_s=17))
    assert not find_suspects({0: LastHeartbeat(None, 0.0)}, NOW_S, RunSection())  # it is being built
    first = LastHeartbeat(None, NOW_S - 20).next(report(1, IDLE, 0.0), NOW_S - 17)
    late = first.next(None, NOW_S - 16)  # a late reply from before the build hides no silence
    assert late == first
    (suspect,) = find_suspects({1: late}, NOW_S, RunSection())
    assert (suspect.kind, suspect.cause[:18]) == ("silent", "silent for 17.0 s ")


WAITING = report(0, IN_CALL, 60.0, waits=True)


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([WAITING, report(1, IN_CALL, 60.0)], [1]),  # the one that does not wait for others
        ([WAITING, report(1, LOADING, 60.0)], [1]),
        ([WAITING, report(1, RETRYING, 5.0)], []),
        ([WAITING, report(1, SNAPSHOT, 60.0)], [1]),
        ([WAITING, report(1, ATTACHING, 1799.0)], []),  # it loads its program, as in a first call
        ([WAITING, report(1, ATTACHING, 1801.0)], [1]),
        ([report(0, ATTACHING, 60.0, waits=True), report(1, LOADING, 60.0)], [1]),
        ([WAITING, report(1, LOADING, 29.0)], []),  # it reaches its own bound later
        ([WAITING, report(1, IN_CALL, 60.0, waits=True, calls=5)], [1]),  # if all wait, that with the fewest calls
        ([WAITING, report(1, IN_CALL, 60.0, waits=True)], [0, 1]),
        ([report(0, LOADING, 299.0), report(1, LOADING, 200.0)], []),  # the disk of all is slow
        ([report(0, LOADING, 301.0), report(1, LOADING, 200.0)], [0]),
        ([report(0, IN_CALL, 29.0)], []),
        ([report(0, IN_CALL, 31.0)], [0]),
        ([report(0, IN_CALL, 59.0, slowest=20.0)], []),  # a call may take three times the slowest so far
        ([report(0, IN_CALL, 61.0, slowest=20.0)], [0]),
        ([report(0, IN_CALL, 1799.0, slowest=None)], []),
    ],
)
def test_the_instance_that_is_stuck_is_found(reports: List[HeartbeatReport], expected: List[int]) -> None:
    assert stuck(*reports) == expected


def test_a_first_call_has_the_report_timeout_and_cpu_time_since_a_late_heartbeat_is_unknown() -> None:
    (suspect,) = suspects(report(0, IN_CALL, 61.0, slowest=None), report_timeout_s=60)
    assert suspect.cause == "stuck: in call 7 for 61.0 s (run.report_timeout_s = 60 limits a first call)"
    (suspect,) = suspects(report(0, ATTACHING, 61.0), report_timeout_s=60)
    assert suspect.cause == "stuck: attaching the device for 61.0 s (run.report_timeout_s = 60)"
    heartbeats = {0: busy_until(61.0, report(0, IN_CALL, 0.0, slowest=None), 100.0)}  # also if it uses CPU time
    assert find_suspects(heartbeats, 61.0, RunSection(report_timeout_s=60))
    heartbeats = {0: busy_until(50.0, report(0, IN_CALL, 0.0), 50.0)}
    assert not find_suspects(heartbeats, 54.0, RunSection(stuck_after_s=3, report_timeout_s=100))
    (suspect,) = find_suspects(heartbeats, 66.0, RunSection(stuck_after_s=3, report_timeout_s=100))
    assert suspect.kind == "silent"


# ---- instances that use CPU time -------------------------------------------------------------------------------------


def busy_until(now_s: float, first: HeartbeatReport, end_s: float) -> LastHeartbeat:
    """Return the last of heartbeats once per second, of an instance whose threads use 5 % of a core until `end_s`."""
    last, cpu_s = LastHeartbeat(first, 0.0), 0.0
    for second in range(1, int(now_s) + 1):
        cpu_s += 0.05 if second <= end_s else 0.001
        last = last.next(dataclasses.replace(first, duration_s=float(second), cpu_s=cpu_s), float(second))
    return last


@pytest.mark.parametrize(
    ("now_s", "end_s", "is_stuck"),
    [
        (200.0, 200.0, False),
        (229.0, 200.0, False),
        (231.0, 200.0, True),  # blocked for run.stuck_after_s
        (31.0, 0.0, True),
        (30 * BUSY_FACTOR + 1, 1000.0, True),  # an endless loop
    ],
)
def test_a_call_may_take_longer_while_its_threads_use_cpu_time(now_s: float, end_s: float, is_stuck: bool) -> None:
    heartbeats = {0: busy_until(now_s, report(0, IN_CALL, 0.0), end_s)}
    found = find_suspects(heartbeats, now_s, RunSection())
    assert [suspect.kind for suspect in found] == (["stuck"] if is_stuck else [])
    if is_stuck and end_s > now_s:
        assert found[0].cause.endswith("(run.stuck_after_s = 30; 300 s while its threads use CPU time)")


# ---- survivors of a loss ---------------------------------------------------------------------------------------------


def unreleased(last: LastHeartbeat, now_s: float, **bounds: Any) -> List[str]:
    """Return the causes; the collectives of the survivor are aborted since 0 s."""
    return [suspect.cause for suspect in find_unreleased({0: last}, [0], 0.0, now_s, RunSection(**bounds))]


@pytest.mark.parametrize("activity", [IN_CALL, "evaluate", IDLE])
def test_a_survivor_that_waits_must_end_that_within_the_stop_timeout(activity: str) -> None:
    last = LastHeartbeat(report(0, activity, 5.0, waits=activity != IDLE), 11.0)
    assert unreleased(last, 9.0) == []
    (cause,) = unreleased(last, 11.0)
    assert cause == "did not abort its collectives with the lost instances within 11.0 s (run.stop_timeout_s = 10)"


def test_a_survivor_that_waits_and_uses_cpu_time_has_longer_and_a_silent_one_is_not_waited_for() -> None:
    waiting = report(0, IN_CALL, 0.0, waits=True)
    assert unreleased(busy_until(90.0, waiting, 90.0), 90.0) == []
    assert unreleased(busy_until(90.0, waiting, 75.0), 90.0)
    assert unreleased(busy_until(10 * BUSY_FACTOR + 1, waiting, 1000.0), 10 * BUSY_FACTOR + 1)
    assert unreleased(LastHeartbeat(report(0, "evaluate", 1.0), 0.0), 16.0)[0].startswith("silent for 16.0 s")
    assert unreleased(LastHeartbeat(None, 0.0), 500.0) == []  # it is being built


def test_a_survivor_that_computes_has_the_timeout_of_a_call() -> None:
    assert unreleased(LastHeartbeat(report(0, IN_CALL, 29.0), 29.0), 29.0) == []
    assert unreleased(LastHeartbeat(report(0, LOADING, 31.0), 31.0), 31.0)
    assert unreleased(LastHeartbeat(report(0, "evaluate", 500.0), 500.0), 500.0) == []  # it has its own timeout
    on_ipus = RunSection().on_device("ipu")
    last = {0: LastHeartbeat(report(0, IN_CALL, 31.0), 31.0)}
    assert find_suspects(last, 31.0, on_ipus) == []
    assert [each.instance for each in find_unreleased(last, [0], 0.0, 31.0, on_ipus)] == [0]  # it cannot end
    for activity, limit_s in ((LOADING, on_ipus.call_timeout_s), (ATTACHING, on_ipus.report_timeout_s)):  # these can
        for seconds, expected in ((limit_s - 1, []), (limit_s + 1, [0])):
            last = {0: LastHeartbeat(report(0, activity, seconds), seconds)}
            assert [each.instance for each in find_unreleased(last, [0], -seconds, seconds, on_ipus)] == expected
