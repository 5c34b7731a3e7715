"""What an instance keeps when others are lost: its process, its compiled model, the newest weights it can read."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, List, Tuple

import poptorch
import pytest

from raypod import coordinator
from raypod.events import CallReport, Event, Repaired, RunEnded, UpdateDone
from raypod.fleet import FleetBroken
from raypod.fleet.inline import InlineFleet
from raypod.metrics import MetricsFold
from raypod.plan import Leg, Plan

BREAKS_AFTER = 9


class LosesItsWires(InlineFleet):
    """An instance whose wires to others break after so many updates of the run, once."""

    def run(self, leg: Leg, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        for report in super().run(leg, stop_requested):
            yield report
            if self._has_wires and report.first_update + 1 == BREAKS_AFTER:
                self._has_wires = False
                raise FleetBroken((), "the wires are cut")

    def repair(self, lost: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        position = self._instance.leave()  # type: ignore[union-attr]
        self._instance.join({})  # type: ignore[union-attr]
        return {0: position}

    _has_wires = True


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> List[Any]:
    """The models that were compiled."""
    models: List[Any] = []
    real = poptorch.PoplarExecutor.compile
    monkeypatch.setattr(
        poptorch.PoplarExecutor, "compile", lambda self, *batch: (models.append(self), real(self, *batch))[1]
    )
    return models


def plan_for(make: Callable[..., Plan], model: str) -> Plan:
    run = {"fleet": "inline", "device": "emulated", "checkpoint_every": "4 updates"}
    training = {"updates": 14, "model": model, "lr_schedule": "constant", "warmup_updates": 0}
    return make(training=training, pod={"num_instances": 1}, run=run)


def events_of(plan: Plan, fleet: InlineFleet) -> List[Event]:
    return list(coordinator.run(plan, fleet, MetricsFold(plan, 0.0)))


def only(events: List[Event], kind: type) -> Any:
    (found,) = (event for event in events if isinstance(event, kind))
    return found


def test_a_survivor_goes_on_with_what_its_device_holds(make: Callable[..., Plan], compiled: List[Any]) -> None:
    plan = plan_for(make, "resnet8")
    undisturbed = only(events_of(plan, InlineFleet(plan)), RunEnded).weights_sha256
    compiled.clear()
    events = events_of(plan, LosesItsWires(plan))
    assert only(events, RunEnded).weights_sha256 == undisturbed
    assert only(events, Repaired).update == BREAKS_AFTER
    assert len(compiled) == 2  # the training and the evaluation, once each


def test_a_device_that_cannot_be_read_costs_the_updates_since_it_was_read_last(
    make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(make, "tiny")
    undisturbed = only(events_of(plan, InlineFleet(plan)), RunEnded).weights_sha256

    def fails(training: Any) -> None:
        """As on IPUs: one dead instance ends the device runs of the others, and what was on the devices is gone."""
        monkeypatch.undo()
        training._program.close_connections()
        training._is_attached = training._device_is_newer = False
        training._optimizer._host_is_newer = True
        raise poptorch.Error("Application runtime error: the device run has ended")

    fleet = LosesItsWires(plan)
    told = []
    for event in coordinator.run(plan, fleet, MetricsFold(plan, 0.0)):
        told.append(event)
        if isinstance(event, UpdateDone) and event.update == BREAKS_AFTER:
            monkeypatch.setattr("raypod.state.replica_state.read", fails)
    assert only(told, Repaired).update == 8  # the last checkpoint's
    assert only(told, RunEnded).weights_sha256 == undisturbed
    assert [event.update for event in told if isinstance(event, UpdateDone)] == list(range(1, 15))
