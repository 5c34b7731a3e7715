"""Which instances are considered silent or stuck."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import pytest

from raypod.events import HeartbeatReport
from raypod.fleet.liveness import LastHeartbeat, Suspect, find_suspects
from raypod.instance.control import IDLE, LOADING
from raypod.plan.config import RunSection

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


def test_instances_within_their_bounds_are_no_suspects() -> None:
    assert not suspects(report(0, IN_CALL, 29.0), report(1, LOADING, 29.0))
    assert not suspects(report(0, IDLE, 5000.0), report(1, "save", 5000.0))  # they have their own timeouts


def test_a_silent_instance_is_a_suspect_and_its_last_activity_is_named() -> None:
    heartbeats = {
        0: LastHeartbeat(report(0, IN_CALL, 1.0, waits=True), NOW_S - 1),
        1: LastHeartbeat(report(1, LOADING, 1.0), NOW_S - 16),
    }
    (suspect,) = find_suspects(heartbeats, NOW_S, RunSection())
    assert (suspect.instance, suspect.kind) == (1, "silent")
    assert suspect.cause.startswith("silent for 16.0 s (run.silent_after_s = 15)")
    assert suspect.cause.endswith("it was loading data")
    assert not find_suspects(heartbeats, NOW_S, RunSection(silent_after_s=17))
    assert not find_suspects({0: LastHeartbeat(None, 0.0)}, NOW_S, RunSection())  # it is being built


def test_the_instance_that_does_not_wait_for_others_is_the_suspect() -> None:
    waiting = report(0, IN_CALL, 60.0, waits=True)
    assert stuck(waiting, report(1, IN_CALL, 60.0)) == [1]
    assert stuck(waiting, report(1, LOADING, 60.0)) == [1]
    assert stuck(waiting, report(1, LOADING, 29.0)) == []  # it reaches its own bound later


def test_if_all_wait_the_instance_with_the_fewest_calls_is_the_suspect() -> None:
    assert stuck(report(0, IN_CALL, 60.0, waits=True, calls=6), report(1, IN_CALL, 60.0, waits=True, calls=5)) == [1]
    assert stuck(report(0, IN_CALL, 60.0, waits=True), report(1, IN_CALL, 60.0, waits=True)) == [0, 1]


@pytest.mark.parametrize(
    ("slowest", "duration_s", "is_stuck"),
    [(2.0, 29.0, False), (2.0, 31.0, True), (20.0, 59.0, False), (20.0, 61.0, True), (None, 1799.0, False)],
)
def test_a_call_may_take_three_times_the_slowest_so_far(
    slowest: Optional[float], duration_s: float, is_stuck: bool
) -> None:
    assert bool(stuck(report(0, IN_CALL, duration_s, slowest=slowest))) is is_stuck


def test_a_first_call_has_the_report_timeout() -> None:
    (suspect,) = suspects(report(0, IN_CALL, 61.0, slowest=None), report_timeout_s=60)
    assert suspect.cause == "stuck: in call 7 for 61.0 s (run.report_timeout_s = 60 limits a first call)"
