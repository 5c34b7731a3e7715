"""Everything that is ready is taken at once; pauses of this process are detected."""

from __future__ import annotations

import pytest
from scripted_ray import NEVER, ActorDied, Ref, ScriptedRay, Stream

from raypod.fleet.ray_wait import NO_VALUE, PauseDetector, take_ready


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> ScriptedRay:
    return ScriptedRay(monkeypatch)


def test_all_ready_results_and_stream_items_are_taken_with_few_waits(ray: ScriptedRay) -> None:
    results = [Ref(number) for number in range(64)]
    stream, open_stream = Stream([(0.0, "a"), (0.0, "b")]), Stream([(0.0, "c"), (NEVER, "d")])
    late = Ref("late", NEVER)
    arrivals = take_ready(ray, [*results, late, stream, open_stream], 1.0)
    assert [each.value for each in arrivals if each.ref in results] == list(range(64))
    assert [each.value for each in arrivals if each.ref is stream] == ["a", "b", NO_VALUE]
    assert [each.is_finished for each in arrivals if each.ref is stream] == [False, False, True]
    assert [(each.value, each.is_finished) for each in arrivals if each.ref is open_stream] == [("c", False)]
    assert not [each for each in arrivals if each.ref is late]
    assert ray.waits == 4


def test_an_error_is_that_of_its_reference_only(ray: ScriptedRay) -> None:
    died = ActorDied("its process ended")
    good, bad = take_ready(ray, [Ref(1), Ref(died)], 1.0)
    assert (good.value, good.error, good.is_finished) == (1, None, True)
    assert (bad.error, bad.is_finished) == (died, True)


def test_the_wait_is_bounded(ray: ScriptedRay) -> None:
    assert take_ready(ray, [Ref(1, NEVER)], 0.5) == []
    assert ray.now_s == 1000.5
    assert take_ready(ray, [], 0.5) == []


def test_an_endless_stream_does_not_delay_the_caller_endlessly(ray: ScriptedRay) -> None:
    stream = Stream([(0.0, number) for number in range(1000)])
    assert 0 < len(take_ready(ray, [stream], 1.0)) < 1000


def test_a_long_interval_between_two_polls_is_a_pause(ray: ScriptedRay) -> None:
    pauses = PauseDetector()
    ray.now_s += 1.0
    assert pauses.poll() == 0.0
    ray.now_s += 20.0
    assert pauses.poll() == 20.0
    assert pauses.poll() == 0.0
