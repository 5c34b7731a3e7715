"""The failure policy, and repairs of a scripted fleet whose losses are made up."""

from __future__ import annotations

import math
import signal
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import pytest

from raypod.coordinator import coordinator
from raypod.coordinator.recovery import REFILL_S, FailurePolicy, newest, receivers
from raypod.errors import InstanceFailed
from raypod.events import (
    CallReport,
    CheckpointSaved,
    Event,
    InstanceLost,
    InstanceStarted,
    Repaired,
    RunEnded,
    UpdateDone,
)
from raypod.fleet.base import FleetBroken
from raypod.fleet.scripted import ScriptedFleet
from raypod.plan.plan import Leg, Plan
from raypod.record.metrics import MetricsAggregator


def lost(instance: int, kind: str = "died", cause: str = "its process died") -> InstanceLost:
    return InstanceLost(instance, f"h{instance}", kind, cause, "in call 3", "", f"instance-{instance}.log")  # type: ignore[arg-type]


def broken(*losses: InstanceLost) -> FleetBroken:
    return FleetBroken(losses, "instance 0 has lost others: the barrier")


# ---- the policy -----------------------------------------------------------------------------------------------------


def test_lost_instances_are_replaced_in_order() -> None:
    decision = FailurePolicy("emulated", 3).decide(broken(lost(2), lost(0)), 10, 0.0)
    assert (decision.replace, decision.may_share_hosts, decision.error) == ((0, 2), True, None)
    assert not FailurePolicy("ipu", 3).decide(broken(lost(1)), 10, 0.0).may_share_hosts


def test_instances_that_lost_their_connections_are_not_replaced() -> None:
    assert FailurePolicy("ipu", 1).decide(broken(), 10, 0.0).replace == ()


def test_the_error_after_the_last_restart_names_the_first_cause() -> None:
    policy = FailurePolicy("emulated", 2)
    for instance in (0, 1):
        assert policy.decide(broken(lost(instance)), instance, 0.0).error is None
    error = policy.decide(broken(lost(2, "silent", "silent for 16 s"), lost(0)), 5, 0.0).error
    assert isinstance(error, InstanceFailed)
    assert (error.instance, error.host, policy.restarts) == (2, "h2", 2)
    assert str(error).startswith("instance 2 on host h2 failed: silent for 16 s (not repaired: the limit --max-res")
    assert "the first failure was: instance 0 on host h0 failed" in str(error)


def test_the_error_does_not_repeat_an_equal_first_failure() -> None:
    policy = FailurePolicy("emulated", 1)
    policy.decide(broken(lost(0)), 1, 0.0)
    error = str(policy.decide(broken(lost(0)), 2, 0.0).error)
    assert error.endswith("is reached; the first failure had the same cause); its log: instance-0.log")


def test_without_restarts_the_error_is_the_cause_alone() -> None:
    error = FailurePolicy("emulated", 0).decide(broken(lost(1)), 5, 0.0).error
    assert str(error) == "instance 1 on host h1 failed: its process died; its log: instance-1.log"
    assert "lost their connections" in str(FailurePolicy("emulated", 0).decide(broken(), 5, 0.0).error)


@pytest.mark.parametrize(("later_s", "ends"), [(REFILL_S - 1, True), (REFILL_S, False)])
def test_an_hour_without_a_failure_restores_all_restarts(later_s: float, ends: bool) -> None:
    policy = FailurePolicy("emulated", 1)
    policy.decide(broken(lost(0)), 1, 100.0)
    assert (policy.decide(broken(lost(0)), 900, 100.0 + later_s).error is not None) is ends


def test_the_same_exception_at_the_same_update_ends_the_run() -> None:
    policy = FailurePolicy("emulated", 9)
    raised = broken(lost(1, "raised", "ValueError: no such layer"))
    assert policy.decide(raised, 7, 0.0).error is None
    assert policy.decide(raised, 8, 0.0).error is None
    assert policy.decide(broken(lost(1, "raised", "OSError: no disk")), 8, 0.0).error is None
    assert "ValueError: no such layer (the same happened at update 8 before)" in str(
        policy.decide(raised, 8, 0.0).error
    )
    assert FailurePolicy("emulated", 9).decide(broken(lost(1)), 8, 0.0).error is None  # a death may be repeated


@pytest.mark.parametrize(
    ("positions", "root", "receiving"),
    [
        ({0: 5, 1: 6, 3: 6}, 1, [0, 2]),
        ({0: 6, 1: 6}, 0, [2, 3]),
        ({2: 0}, 2, [0, 1, 3]),
        ({0: -1, 1: -1}, None, []),
        ({}, None, []),
    ],
)
def test_the_newest_survivor_sends_its_state_to_the_others(
    positions: Dict[int, int], root: Optional[int], receiving: List[int]
) -> None:
    assert newest(positions) == root
    if root is not None:
        assert receivers(positions, root, 4) == receiving


# ---- repairs --------------------------------------------------------------------------------------------------------


def events_of(plan: Plan, fleet: ScriptedFleet) -> List[Event]:
    return list(coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0)))


def only(events: List[Event], kind: type) -> Any:
    (found,) = (event for event in events if isinstance(event, kind))
    return found


class LosesTheWriter(ScriptedFleet):
    """Instance 0 is lost during the last checkpoint, and instance 1 during the repair."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.repairs: List[Tuple[int, ...]] = []

    def call(self, method: str, *arguments: Any) -> List[Any]:
        if method == "finish_saves" and not self.repairs:
            self._saves = ()
            raise broken(lost(0))
        return super().call(method, *arguments)

    def repair(self, lost_instances: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        self.repairs.append(lost_instances)
        if len(self.repairs) == 1:
            raise broken(lost(1))
        return dict.fromkeys(set(self._instances) - {0, 1}, self._plan.total_updates)


def test_a_checkpoint_that_is_lost_with_its_writer_is_written_again(make: Callable[..., Plan]) -> None:
    plan = make(training={"updates": 4}, pod={"replicas": 4, "num_instances": 4}, run={"checkpoint_every": "9 updates"})
    fleet = LosesTheWriter(plan)
    events = events_of(plan, fleet)
    assert fleet.repairs == [(0,), (1,)]
    assert fleet.called.count("save") == 2
    repaired = only(events, Repaired)
    assert (repaired.lost, repaired.seeded_from, repaired.update) == ((0, 1), "instance 2", 4)
    assert only(events, RunEnded).checkpoint == "update-4"


class LosesAnotherThanTheWriter(ScriptedFleet):
    """Instance 1 is lost during the last checkpoint, after instance 0 has reported it."""

    def call(self, method: str, *arguments: Any) -> List[Any]:
        results = super().call(method, *arguments)
        if method == "finish_saves" and self._saves:
            self._saves = ()  # instance 0 reports a checkpoint once
            raise FleetBroken((lost(1),), "", {0: results[0]})
        return results

    def repair(self, lost_instances: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        return {0: self._plan.total_updates}


def test_the_report_of_a_checkpoint_is_kept_if_another_instance_is_lost(make: Callable[..., Plan]) -> None:
    plan = make(training={"updates": 4}, pod={"num_instances": 2}, run={"checkpoint_every": "9 updates"})
    fleet = LosesAnotherThanTheWriter(plan)
    events = events_of(plan, fleet)
    assert fleet.called.count("save") == 1
    assert [event.update for event in events if isinstance(event, CheckpointSaved)] == [4]
    assert only(events, RunEnded).checkpoint == "update-4"


class LosesAllInstances(LosesTheWriter):
    """All instances are lost during the last checkpoint, and there is no earlier one."""

    def repair(self, lost_instances: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        self.repairs.append(lost_instances)
        return {}


def test_a_run_that_loses_all_instances_at_its_end_trains_again(make: Callable[..., Plan]) -> None:
    plan = make(training={"updates": 4}, pod={"num_instances": 2}, run={"checkpoint_every": "9 updates"})
    fleet, metrics = LosesAllInstances(plan), MetricsAggregator(plan, 0.0)
    events = list(coordinator.run(plan, fleet, metrics))
    repaired = only(events, Repaired)
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
                raise broken(lost(1 - report.first_update))

    def repair(self, lost_instances: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        return dict.fromkeys(set(self._instances) - set(lost_instances), 1)


def test_a_run_without_restarts_left_ends_with_its_first_failure(make: Callable[..., Plan]) -> None:
    plan = make(training={"updates": 4}, pod={"num_instances": 2}, run={"max_restarts": 1})
    with pytest.raises(
        InstanceFailed, match="--max-restarts 1 is reached; the first failure was: instance 1"
    ) as caught:
        events_of(plan, LosesOneAfterTheOther(plan))
    assert caught.value.instance == 0


class FailsOnce(ScriptedFleet):
    """Instance 1 fails before it reports the update `at`."""

    kind, at = "raised", 0

    def run(self, leg: Leg, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        for report in super().run(leg, stop_requested):
            if (report.first_update, report.instance) == (self.at, 1) and "failed" not in self.called:
                self.called.append("failed")
                raise broken(lost(1, self.kind, "ValueError: no such layer"), lost(0, self.kind))
            yield report

    def repair(self, lost_instances: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        return {}


@pytest.mark.parametrize(("kind", "at", "restarts"), [("raised", 0, None), ("raised", 1, 1), ("died", 0, 1)])
def test_an_exception_before_the_first_call_is_complete_ends_the_run(
    make: Callable[..., Plan], kind: str, at: int, restarts: Optional[int]
) -> None:
    plan = make(training={"updates": 3}, pod={"num_instances": 2})
    fleet, events = FailsOnce(plan), []
    fleet.kind, fleet.at = kind, at
    run = coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0))
    if restarts is None:
        with pytest.raises(InstanceFailed, match="instance 1 on host h1 failed: ValueError: no such layer; its log"):
            events += run
        assert not any(isinstance(event, InstanceLost) for event in events)
        return
    events += run
    assert only(events, Repaired).restarts == restarts


class LosesAReport(ScriptedFleet):
    """Instance 1 is lost after the others have completed an update and before it reports that."""

    UPDATE = 2
    recovered: Optional[List[CallReport]] = None  # reports that instance 0 has of instance 1

    def run(self, leg: Leg, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        for report in super().run(leg, stop_requested):
            if (report.first_update, report.instance) == (self.UPDATE, 1) and "lost" not in self.called:
                self.called.append("lost")
                raise broken(lost(1))
            yield report

    def call(self, method: str, *arguments: Any) -> List[Any]:
        if method == "lost_reports":
            assert arguments == ([(self.UPDATE, 1)],)
            return [self.recovered, None]
        return super().call(method, *arguments)

    def repair(self, lost_instances: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        return {0: self.UPDATE + 1}


@pytest.mark.parametrize("is_recovered", [True, False])
def test_a_lost_report_is_recovered_or_its_update_has_no_loss(make: Callable[..., Plan], is_recovered: bool) -> None:
    plan = make(training={"updates": 5}, pod={"num_instances": 2}, run={"on_nonfinite": "stop"})
    undisturbed = [event for event in events_of(plan, ScriptedFleet(plan)) if isinstance(event, UpdateDone)]
    fleet = LosesAReport(plan)
    if is_recovered:
        fleet.recovered = [each for each in fleet.reports(fleet.UPDATE) if each.instance == 1]
    events = events_of(plan, fleet)
    found = [event for event in events if isinstance(event, UpdateDone)]
    assert [event.update for event in found] == [1, 2, 3, 4, 5]
    unknown = [] if is_recovered else [3]
    assert [event.update for event in found if event.missing_reports == (1,)] == unknown
    assert [event.update for event in found if math.isnan(event.loss)] == unknown
    same = [(event.update, event.metrics) for event in found if event.has_results]
    assert same == [(each.update, each.metrics) for each in undisturbed if each.update not in unknown]
    assert isinstance(events[-1], RunEnded)


class Drained(ScriptedFleet):
    """Ray drains the host of instance 1."""

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

    def repair(self, lost_instances: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        self.moved = True
        return {0: 1}


@pytest.mark.parametrize("room", [True, False])
def test_a_drained_host_costs_no_restart_and_no_update(make: Callable[..., Plan], room: bool) -> None:
    plan = make(training={"updates": 4}, pod={"num_instances": 2}, run={"max_restarts": 0})
    fleet = Drained(plan)
    fleet.room = room
    events = events_of(plan, fleet)
    updates = [event.update for event in events if isinstance(event, UpdateDone)]
    moves = [(event.lost, event.hosts, event.restarts) for event in events if isinstance(event, Repaired)]
    if room:
        assert (updates, moves) == ([1, 2, 3, 4], [((1,), ("c",), 0)])
    else:
        assert (updates, moves) == ([1], [])
    ended = only(events, RunEnded)
    assert ended.checkpoint == f"update-{len(updates)}"
    assert ended.cause == ("" if room else "Ray drains host b")


class IgnoresAnException(ScriptedFleet):
    """A fleet that receives a signal in a finalizer, whose exceptions Python ignores, while it starts."""

    def start(self) -> List[InstanceStarted]:
        class Finalized:
            def __del__(self) -> None:
                signal.raise_signal(signal.SIGTERM)

        Finalized()
        return super().start()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_whose_exception_is_ignored_ends_the_run(make: Callable[..., Plan]) -> None:
    plan = make()
    fleet = IgnoresAnException(plan)
    with pytest.raises(KeyboardInterrupt):
        list(coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0)))
    assert fleet.called == []
