"""`--max-unsaved`: a run whose checkpoints cannot be written stops training, and waits for its disk."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, Callable, List, Optional

import pytest

from raypod.errors import CheckpointNotSaved
from raypod.events import CallReport, CheckpointFailed, CheckpointSaved, Event, RunEnded, SaveReport
from raypod.plan.plan import Plan
from raypod.runs.metrics import MetricsAggregator
from raypod.runtime.coordinator import checkpoint_schedule, coordinator
from raypod.runtime.coordinator.stop import Stop
from raypod.runtime.workers.scripted import ScriptedFleet
from tests.support.scripted_runs import of, only, updates_of

Make = Callable[..., Plan]
UPDATE_S, WAIT_S = 60.0, 600.0


class DiskFills(ScriptedFleet):
    """Writes the checkpoints at `full_from_s` <= now_s < `space_at_s` not. An update takes a minute."""

    can_pass = True

    def __init__(self, plan: Plan, monkeypatch: pytest.MonkeyPatch, full_from_s: float, space_at_s: float) -> None:
        super().__init__(plan)
        self.now_s, self.waited_s, self._full = 0.0, 0.0, (full_from_s, space_at_s)
        self.on_sleep: Callable[[], object] = lambda: None
        clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self._sleep)
        monkeypatch.setattr(checkpoint_schedule, "time", clock)
        monkeypatch.setattr(coordinator, "time", clock)

    def _sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s, self.waited_s = self.now_s + seconds, self.waited_s + seconds
        self.on_sleep()

    def call(self, method: str, *arguments: Any) -> List[Any]:
        results = super().call(method, *arguments)
        if method == "save" and self._full[0] <= self.now_s < self._full[1]:
            update = arguments[0].update
            self._saves = (SaveReport(update, f"update-{update}", "", "no space", can_pass=self.can_pass),)
        elif method == "finish_saves":
            self._saves = ()
        return results

    def reports(self, update: int) -> List[CallReport]:
        first, *others = super().reports(update)
        self.now_s, saves, self._saves = self.now_s + UPDATE_S, self._saves, ()
        return [dataclasses.replace(first, saves=saves), *others]


def plan_of(make: Make, **run: Any) -> Plan:
    run = {"checkpoint_every": "2 updates", "save_retry_s": WAIT_S, **run}
    return make(training={"updates": 20}, pod={"num_instances": 2}, run=run)


def ended_by(plan: Plan, fleet: ScriptedFleet, events: List[Event], stop: Optional[Stop] = None) -> CheckpointNotSaved:
    with pytest.raises(CheckpointNotSaved) as caught:
        events.extend(coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0), stop=stop))
    return caught.value


@pytest.mark.parametrize(("limit", "waits_at"), [("2 checkpoints", 7), ("3.5 minutes", 9), ("60 minutes", None)])
def test_training_stops_after_max_unsaved_and_goes_on_once_there_is_space(
    make: Make, monkeypatch: pytest.MonkeyPatch, limit: str, waits_at: Optional[int]
) -> None:
    plan = plan_of(make, max_unsaved=limit)
    fleet = DiskFills(plan, monkeypatch, 200.0, 800.0)  # the checkpoint of update 2 is written, that of 4 is not
    events = list(coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0)))
    assert updates_of(events) == list(range(1, 21))
    waits = [(each.update, each.waits_s) for each in of(events, CheckpointFailed) if each.waits_s]
    assert waits == ([] if waits_at is None else [(waits_at, WAIT_S)])
    assert (fleet.waited_s > 100) == bool(waits)
    assert of(events, CheckpointSaved)[1].update == (waits_at or 14)  # with 60 minutes: the first after 800 s
    assert only(events, RunEnded).updates == 20


def test_a_disk_without_space_ends_the_run_after_a_stated_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, events = plan_of(make, max_unsaved="1 checkpoint"), []  # type: ignore[var-annotated]
    fleet = DiskFills(plan, monkeypatch, 200.0, 1e9)
    error = ended_by(plan, fleet, events)
    assert fleet.waited_s == pytest.approx(WAIT_S)
    assert updates_of(events) == [1, 2, 3, 4, 5]
    assert (
        f"no space after {WAIT_S:.0f} s (--save-retry-s); once the disk can be written, continue from update-2"
        in str(error)
    )


def test_the_first_and_the_last_checkpoint_wait_for_the_disk(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(make)
    fleet = DiskFills(plan, monkeypatch, 0.0, 500.0)
    events = list(coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0)))
    assert [each.update for each in of(events, CheckpointSaved)] == [3, *range(4, 21, 2)]
    last = DiskFills(plan, monkeypatch, 1200.0, 1500.0)
    events = list(coordinator.run(plan, last, MetricsAggregator(plan, 0.0)))
    assert of(events, CheckpointSaved)[-1].update == 20
    assert of(events, CheckpointFailed)[-1].waits_s == WAIT_S


def test_nobody_waits_for_the_disk_once_a_stop_is_requested(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, stop, events = plan_of(make), Stop(), []  # type: ignore[var-annotated]
    fleet = DiskFills(plan, monkeypatch, 0.0, 1e9)
    fleet.on_sleep = lambda: stop.request("the user") if fleet.waited_s > 5 else None
    assert "there is no earlier checkpoint" in str(ended_by(plan, fleet, events, stop))
    assert fleet.waited_s < 10


def test_a_checkpoint_that_cannot_be_written_for_another_reason_is_not_waited_for(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(make)
    fleet = DiskFills(plan, monkeypatch, 0.0, 1e9)
    fleet.can_pass = False
    assert "so the run ends here" in str(ended_by(plan, fleet, []))
    assert not fleet.waited_s
