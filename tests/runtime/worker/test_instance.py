"""An instance that leaves and joins again keeps its process, its compiled model and the newest readable weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List, Tuple

import popdist
import poptorch
import pytest

from raypod.errors import CollectiveBroken, InstanceFailed
from raypod.events import CallReport, EvaluationDone, Event, Repaired, RunEnded, UpdateDone
from raypod.plan.plan import Plan, Segment
from raypod.runs.metrics import MetricsAggregator
from raypod.runtime.coordinator import coordinator
from raypod.runtime.worker.control import ATTACHING
from raypod.runtime.worker.training_state import Snapshots
from raypod.runtime.workers.fleet import FleetBroken
from raypod.runtime.workers.inline import InlineFleet
from raypod.training.checkpoint import storage
from raypod.training.checkpoint.resume import newest_valid
from raypod.training.checkpoint.snapshots import Place

BREAKS_AFTER = 9


class DisconnectingFleet(InlineFleet):
    """An instance whose connections break once, after `BREAKS_AFTER` updates."""

    def run(self, segment: Segment, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        for report in super().run(segment, stop_requested):
            yield report
            if self._is_connected and report.first_update + 1 == BREAKS_AFTER:
                self._is_connected = False
                raise FleetBroken((), "the connections are broken")

    def repair(self, lost: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        position = self._instance.leave()  # type: ignore[union-attr]
        self._instance.join({})  # type: ignore[union-attr]
        return {0: position}

    _is_connected = True


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> List[Any]:
    """The models that have been compiled, in order."""
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
    return list(coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0)))


def only(events: List[Event], kind: type) -> Any:
    (found,) = (event for event in events if isinstance(event, kind))
    return found


def test_a_survivor_continues_with_the_state_on_its_device(make: Callable[..., Plan], compiled: List[Any]) -> None:
    plan = plan_for(make, "resnet8")
    uninterrupted = only(events_of(plan, InlineFleet(plan)), RunEnded).weights_sha256
    compiled.clear()
    events = events_of(plan, DisconnectingFleet(plan))
    assert only(events, RunEnded).weights_sha256 == uninterrupted
    assert only(events, Repaired).update == BREAKS_AFTER
    assert len(compiled) == 2  # the training and the evaluation, once each


def test_neither_a_training_nor_a_repair_initializes_popdist(
    make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: List[str] = []
    for name in ("init", "finalizeBackend"):
        monkeypatch.setattr(popdist, name, lambda name=name: called.append(name))
    plan = plan_for(make, "tiny")
    events = events_of(plan, DisconnectingFleet(plan))
    assert only(events, Repaired).update == BREAKS_AFTER
    assert called == []


def test_a_device_that_is_attached_again_is_an_activity_of_its_own(
    make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That loads the program, which can take longer than a call."""
    plan, activities = plan_for(make, "tiny"), []
    fleet, real = DisconnectingFleet(plan), poptorch.PoplarExecutor.attachToDevice

    def attach(model: Any) -> None:
        activities.append(fleet._instance.heartbeat.beat().activity)  # type: ignore[union-attr]
        real(model)

    monkeypatch.setattr(poptorch.PoplarExecutor, "attachToDevice", attach)
    assert only(events_of(plan, fleet), Repaired).update == BREAKS_AFTER
    assert activities[0] == ATTACHING
    assert not any(activity.startswith("in call") for activity in activities)


class AbortingFleet(DisconnectingFleet):
    """The first evaluation is aborted."""

    _is_connected, evaluations = False, 0

    def call(self, method: str, *arguments: Any) -> List[Any]:
        if method != "evaluate":
            return super().call(method, *arguments)
        self.evaluations += 1
        if self.evaluations > 1:
            return super().call(method, *arguments)
        self._instance.abort_collectives()  # type: ignore[union-attr]
        with pytest.raises(CollectiveBroken, match="instance 0 lost its connection to other instances: the evaluation"):
            super().call(method, *arguments)
        raise FleetBroken((), "another instance is lost")


def test_an_evaluation_is_aborted_and_repeated_after_the_repair(make: Callable[..., Plan]) -> None:
    plan = plan_for(make, "tiny")
    fleets = InlineFleet(plan), AbortingFleet(plan)
    undisturbed, events = (events_of(plan, fleet) for fleet in fleets)
    assert fleets[1].evaluations == 2
    assert [each for each in events if isinstance(each, EvaluationDone)] == [
        each for each in undisturbed if isinstance(each, EvaluationDone)
    ]
    assert only(events, RunEnded).weights_sha256 == only(undisturbed, RunEnded).weights_sha256


def test_an_unreadable_device_loses_the_updates_since_the_last_read_back(
    make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(make, "tiny")
    uninterrupted = only(events_of(plan, InlineFleet(plan)), RunEnded).weights_sha256

    def fails(training: Any) -> None:
        """Fail as on IPUs: when one instance dies, the device runs of the others end and their state is lost."""
        monkeypatch.undo()
        training._program.close_connections()
        training._is_attached = training._device_is_newer = False
        training._optimizer._host_is_newer = True
        raise poptorch.Error("Application runtime error: the device run has ended")

    fleet = DisconnectingFleet(plan)
    seen = []
    for event in coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0)):
        seen.append(event)
        if isinstance(event, UpdateDone) and event.update == BREAKS_AFTER:
            monkeypatch.setattr("raypod.training.models.program.read_replica_state", fails)
    assert only(seen, Repaired).update == 8  # the last checkpoint's
    assert only(seen, RunEnded).weights_sha256 == uninterrupted
    assert [event.update for event in seen if isinstance(event, UpdateDone)] == list(range(1, 15))


def test_an_instance_that_cannot_write_a_snapshot_trains_on() -> None:
    taken: List[bool] = []
    state: Any = SimpleNamespace(
        gather=lambda is_needed: taken.append(is_needed) or {"weights": {}}, memory_format=lambda: None
    )
    snapshots = Snapshots(Place(1 << 22, 1, (3,)))
    with pytest.warns(UserWarning, match="--snapshot-every: no snapshots of this host until .* has ended"):
        snapshots.take(2, state)
    snapshots.take(4, state)
    assert taken == [True, False]  # it still takes part in the collective


class Failing(DisconnectingFleet):
    """The device fails in the call after `BREAKS_AFTER` updates."""

    _is_connected = False

    def run(self, segment: Segment, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        for report in super().run(segment, stop_requested):
            yield report
            if report.first_update + 1 == BREAKS_AFTER:
                self._instance._training.__class__ = _Fails  # type: ignore[union-attr]


class _Fails(poptorch.PoplarExecutor):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise poptorch.RecoverableError("the peer is lost")


def test_the_state_of_a_device_that_failed_in_a_call_is_not_saved(make: Callable[..., Plan]) -> None:
    plan = plan_for(make, "tiny")
    seen: List[Event] = []
    with pytest.raises(InstanceFailed, match="RecoverableError: the peer is lost"):
        seen.extend(coordinator.run(plan, Failing(plan), MetricsAggregator(plan, 0.0)))
    failed = newest_valid(storage.checkpoints_folder(plan.run_dir))[0]
    assert failed is not None
    assert failed.update == 8


def test_a_process_whose_device_cannot_be_released_is_no_survivor(
    make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_training: Any) -> None:
        raise poptorch.Error("Application runtime error: the device is in an error state")

    monkeypatch.setattr(poptorch.PoplarExecutor, "detachFromDevice", fails)
    with pytest.raises(RuntimeError, match="cannot be released after a failed call: Application runtime error"):
        events_of(plan_for(make, "tiny"), DisconnectingFleet(plan_for(make, "tiny")))
