"""The carrying out of repairs, on a fleet whose losses are made up."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest

from raypod.coordinator import coordinator
from raypod.errors import InstanceFailed
from raypod.events import CallReport, Event, InstanceLost, Repaired, RunEnded, UpdateDone
from raypod.fleet.base import FleetBroken
from raypod.fleet.scripted import ScriptedFleet
from raypod.plan.plan import Leg, Plan
from raypod.record.metrics import MetricsFold


def broken(instance: int) -> FleetBroken:
    lost = InstanceLost(instance, "localhost", "died", "its process died", "in call 3", "", "log")
    return FleetBroken((lost,), "")


def events_of(plan: Plan, fleet: ScriptedFleet) -> List[Event]:
    return list(coordinator.run(plan, fleet, MetricsFold(plan, 0.0)))


class LosesTheWriter(ScriptedFleet):
    """Instance 0 is lost with the last checkpoint, and another one while that is repaired."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.asked: List[Tuple[int, ...]] = []

    def call(self, method: str, *arguments: Any) -> List[Any]:
        if method == "finish_saves" and not self.asked:
            self._saves = ()
            raise broken(0)
        return super().call(method, *arguments)

    def repair(self, lost: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        self.asked.append(lost)
        if len(self.asked) == 1:
            raise broken(1)
        return dict.fromkeys(set(self._instances) - {0, 1}, self._plan.total_updates)


def test_a_checkpoint_that_was_lost_with_its_writer_is_written_again(make: Callable[..., Plan]) -> None:
    plan = make(training={"updates": 4}, pod={"replicas": 4, "num_instances": 4}, run={"checkpoint_every": "9 updates"})
    fleet = LosesTheWriter(plan)
    events = events_of(plan, fleet)
    assert fleet.asked == [(0,), (1,)]
    assert fleet.called.count("save") == 2
    (repaired,) = (event for event in events if isinstance(event, Repaired))
    assert (repaired.lost, repaired.seeded_from, repaired.update) == ((0, 1), "instance 2", 4)
    (ended,) = (event for event in events if isinstance(event, RunEnded))
    assert ended.checkpoint == "update-4"


class LosesEverybody(LosesTheWriter):
    """With the last checkpoint all are lost, and there is none before it."""

    def repair(self, lost: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        self.asked.append(lost)
        return {}


def test_who_loses_everybody_with_the_last_checkpoint_trains_again(make: Callable[..., Plan]) -> None:
    plan = make(training={"updates": 4}, pod={"num_instances": 2}, run={"checkpoint_every": "9 updates"})
    fleet, metrics = LosesEverybody(plan), MetricsFold(plan, 0.0)
    events = list(coordinator.run(plan, fleet, metrics))
    (repaired,) = (event for event in events if isinstance(event, Repaired))
    assert (repaired.seeded_from, repaired.update) == ("the beginning", 0)
    assert fleet.called.count("save") == 2
    assert fleet.called[-2:] == ["finish_saves", "evaluate"]
    assert metrics.position == 4
    assert isinstance(events[-1], RunEnded)
    assert (events[-1].updates, events[-1].checkpoint) == (4, "update-4")


class LosesOneAfterTheOther(ScriptedFleet):
    """Instance 1 is lost after the first update, instance 0 after the second."""

    def run(self, leg: Leg, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        for report in super().run(leg, stop_requested):
            yield report
            if report.instance == 1 and report.first_update < 2:
                raise broken(1 - report.first_update)

    def repair(self, lost: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        return dict.fromkeys(set(self._instances) - set(lost), 1)


def test_a_spent_budget_ends_the_run_with_what_began_it(make: Callable[..., Plan]) -> None:
    plan = make(training={"updates": 4}, pod={"num_instances": 2}, run={"max_restarts": 1})
    with pytest.raises(InstanceFailed, match="--max-restarts 1 is spent; the first failure was: instance 1") as caught:
        events_of(plan, LosesOneAfterTheOther(plan))
    assert caught.value.instance == 0


class IsTakenAway(ScriptedFleet):
    """The host of instance 1 is about to be taken away."""

    room, moved = False, False

    def draining(self) -> List[str]:
        return [] if self.moved else ["b"]

    def hosts(self) -> List[str]:
        return ["a", "c" if self.moved else "b"]

    def has_room_for(self, instances: Tuple[int, ...], may_share_hosts: bool) -> bool:
        assert instances == (1,)
        return self.room

    def run(self, leg: Leg, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        for report in super().run(leg, lambda: False):
            yield report
            if report.instance == 1 and stop_requested():
                return

    def repair(self, lost: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        self.moved = True
        return {0: 1}


@pytest.mark.parametrize("room", [True, False])
def test_a_host_that_is_taken_away_costs_no_restart_and_no_update(make: Callable[..., Plan], room: bool) -> None:
    plan = make(training={"updates": 4}, pod={"num_instances": 2}, run={"max_restarts": 0})
    fleet = IsTakenAway(plan)
    fleet.room = room
    events = events_of(plan, fleet)
    told = [event.update for event in events if isinstance(event, UpdateDone)]
    moves = [(event.lost, event.hosts, event.restarts) for event in events if isinstance(event, Repaired)]
    (ended,) = (event for event in events if isinstance(event, RunEnded))
    if room:
        assert (told, moves) == ([1, 2, 3, 4], [((1,), ("c",), 0)])
    else:
        assert (told, moves) == ([1], [])
    assert ended.checkpoint == f"update-{len(told)}"
    assert ended.cause == ("" if room else "Ray drains host b")
