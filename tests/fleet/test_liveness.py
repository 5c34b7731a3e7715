"""Who is to blame when nothing gets on: every case as data."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import pytest

from raypod.events import Beat
from raypod.fleet.liveness import Heard, Trouble, judge
from raypod.instance.control import IDLE, LOADING
from raypod.plan.config import RunSection

NOW_S = 1000.0
IN_CALL = "in call 7"


def beat(
    instance: int, doing: str, for_s: float, waits: bool = False, calls: int = 6, slowest: Optional[float] = 2.0
) -> Beat:
    return Beat(instance, doing, for_s, calls, slowest, waits)


def troubles(*beats: Beat, **bounds: Any) -> List[Trouble]:
    heard: Dict[int, Heard] = {each.instance: Heard(each, NOW_S - 1) for each in beats}
    return judge(heard, NOW_S, RunSection(**bounds))


def blamed(*beats: Beat, **bounds: Any) -> List[int]:
    return [trouble.instance for trouble in troubles(*beats, **bounds)]


def test_all_is_well_while_nobody_exceeds_a_bound() -> None:
    assert not troubles(beat(0, IN_CALL, 29.0), beat(1, LOADING, 29.0))
    assert not troubles(beat(0, IDLE, 5000.0), beat(1, "save", 5000.0))  # they have bounds of their own


def test_silence_has_its_bound_and_says_what_was_last_heard() -> None:
    heard = {0: Heard(beat(0, IN_CALL, 1.0, waits=True), NOW_S - 1), 1: Heard(beat(1, LOADING, 1.0), NOW_S - 16)}
    (trouble,) = judge(heard, NOW_S, RunSection())
    assert (trouble.instance, trouble.kind) == (1, "silent")
    assert trouble.cause.startswith("silent for 16.0 s (run.silent_after_s = 15)")
    assert trouble.cause.endswith("it was loading data")
    assert not judge(heard, NOW_S, RunSection(silent_after_s=17))
    assert not judge({0: Heard(None, 0.0)}, NOW_S, RunSection())  # it is being built


def test_who_does_not_wait_for_others_is_to_blame() -> None:
    waiting = beat(0, IN_CALL, 60.0, waits=True)
    assert blamed(waiting, beat(1, IN_CALL, 60.0)) == [1]
    assert blamed(waiting, beat(1, LOADING, 60.0)) == [1]
    assert blamed(waiting, beat(1, LOADING, 29.0)) == []  # soon, by its own bound


def test_of_those_that_all_wait_the_one_behind_is_to_blame() -> None:
    assert blamed(beat(0, IN_CALL, 60.0, waits=True, calls=6), beat(1, IN_CALL, 60.0, waits=True, calls=5)) == [1]
    assert blamed(beat(0, IN_CALL, 60.0, waits=True), beat(1, IN_CALL, 60.0, waits=True)) == [0, 1]


@pytest.mark.parametrize(
    ("slowest", "for_s", "is_stuck"),
    [(2.0, 29.0, False), (2.0, 31.0, True), (20.0, 59.0, False), (20.0, 61.0, True), (None, 1799.0, False)],
)
def test_a_call_may_take_three_times_the_slowest_so_far(slowest: Optional[float], for_s: float, is_stuck: bool) -> None:
    assert bool(blamed(beat(0, IN_CALL, for_s, slowest=slowest))) is is_stuck


def test_a_first_call_has_the_bound_of_reports() -> None:
    (trouble,) = troubles(beat(0, IN_CALL, 61.0, slowest=None), report_timeout_s=60)
    assert trouble.cause == "stuck: in call 7 for 61.0 s (run.report_timeout_s = 60 bounds a first call)"
