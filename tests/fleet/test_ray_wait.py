"""Everything that is ready is taken at once; pauses of this process are detected."""

from __future__ import annotations

import pytest
from scripted_ray import NEVER, ActorDied, Ref, ScriptedRay, Stream

from raypod.fleet.ray_wait import NO_VALUE, PauseDetector, take_ready


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> ScriptedRay:
    return ScriptedRay(monkeypatch)


def test_all_ready_results_and_items_are_taken_with_two_waits(ray: ScriptedRay) -> None:
    results, streams = [Ref(number) for number in range(64)], [Stream([(0.0, "item")]) for _ in range(64)]
    late = [Ref("late", NEVER), Stream([(NEVER, "late")])]
    refs = [*results, *late, *streams]
    arrivals = take_ready(ray, refs, 1.0)
    assert [each.ref for each in arrivals] == [*results, *streams]
    assert [each.value for each in arrivals] == [*range(64), *["item"] * 64]
    assert [each.is_finished for each in arrivals] == [True] * 64 + [False] * 64
    assert ray.waits == 2
    ends = take_ready(ray, [*late, *streams], 1.0)
    assert [(each.value, each.is_finished) for each in ends] == [(NO_VALUE, True)] * 64


def test_an_error_is_that_of_its_reference_only(ray: ScriptedRay) -> None:
    died = ActorDied("its process ended")
    good, bad = take_ready(ray, [Ref(1), Ref(died)], 1.0)
    assert (good.value, good.error, good.is_finished) == (1, None, True)
    assert (bad.error, bad.is_finished) == (died, True)


def test_the_wait_is_bounded(ray: ScriptedRay) -> None:
    assert take_ready(ray, [Ref(1, NEVER)], 0.5) == []
    assert ray.now_s == 1000.5
    assert take_ready(ray, [], 0.5) == []


def test_a_long_interval_between_two_polls_is_a_pause(ray: ScriptedRay) -> None:
    pauses = PauseDetector()
    ray.now_s += 1.0
    assert pauses.poll() == 0.0
    ray.now_s += 20.0
    assert pauses.poll() == 18.0  # the first two seconds count, or many pauses would keep a timeout from ending
    assert pauses.poll() == 0.0
    ray.now_s += 1.0
    assert pauses.within(0.5, ray.now_s) == 0.0
    assert pauses.within(11.0, ray.now_s) == 10.0
    assert pauses.within(100.0, ray.now_s) == 18.0
