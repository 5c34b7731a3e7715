"""An instance that leaves and joins again keeps its state, also that of its random numbers, in checkpoints too."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import popdist
import poptorch
import pytest

from raypod import train
from raypod.errors import CollectiveBroken, InstanceFailed
from raypod.events import CallReport, EvaluationDone, Event, Repaired, RunEnded, UpdateDone
from raypod.plan.plan import Plan, Segment
from raypod.runs.metrics import MetricsAggregator
from raypod.runtime.coordinator import coordinator
from raypod.runtime.worker.control import ATTACHING
from raypod.runtime.worker.instance import Instance
from raypod.runtime.worker.training_state import RandomStates, Snapshots, TrainingState
from raypod.runtime.workers.fleet import FleetBroken
from raypod.runtime.workers.inline import InlineFleet
from raypod.training.checkpoint import storage
from raypod.training.checkpoint.resume import newest_valid
from raypod.training.checkpoint.snapshots import Place
from raypod.training.checkpoint.tensors import read_nested
from tests.support.scripted_runs import events_of, of, only, updates_of

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
    models: List[Any] = []
    real = poptorch.PoplarExecutor.compile
    compile_it = lambda self, *batch: (models.append(self), real(self, *batch))[1]  # noqa: E731
    monkeypatch.setattr(poptorch.PoplarExecutor, "compile", compile_it)
    return models


def plan_for(make: Callable[..., Plan], model: str) -> Plan:
    run = {"fleet": "inline", "device": "emulated", "checkpoint_every": "4 updates"}
    training = {"updates": 14, "model": model, "lr_schedule": "constant", "warmup_updates": 0}
    return make(training=training, pod={"num_instances": 1}, run=run)


def test_a_survivor_continues_with_the_state_on_its_device(make: Callable[..., Plan], compiled: List[Any]) -> None:
    plan = plan_for(make, "resnet8")
    uninterrupted = only(events_of(plan, InlineFleet(plan)), RunEnded).weights_sha256
    compiled.clear()
    events = events_of(plan, DisconnectingFleet(plan))
    assert only(events, RunEnded).weights_sha256 == uninterrupted
    assert only(events, Repaired).update == BREAKS_AFTER
    assert len(compiled) == 2  # the training and the evaluation, once each


def test_a_repair_attaches_and_begins_no_popdist(make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    """That loads the program, which can take longer than a call."""
    plan, activities, called = plan_for(make, "tiny"), [], []  # type: ignore[var-annotated]
    fleet, real = DisconnectingFleet(plan), poptorch.PoplarExecutor.attachToDevice

    def attach(model: Any) -> None:
        activities.append(fleet._instance.heartbeat.beat().activity)  # type: ignore[union-attr]
        real(model)

    monkeypatch.setattr(poptorch.PoplarExecutor, "attachToDevice", attach)
    for name in ("init", "finalizeBackend"):
        monkeypatch.setattr(popdist, name, lambda name=name: called.append(name))
    assert (only(events_of(plan, fleet), Repaired).update, activities[0]) == (BREAKS_AFTER, ATTACHING)
    assert not any(activity.startswith("in call") for activity in activities)
    assert called == []


class AbortingFleet(DisconnectingFleet):
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
    assert (fleets[1].evaluations, of(events, EvaluationDone)) == (2, of(undisturbed, EvaluationDone))
    assert only(events, RunEnded).weights_sha256 == only(undisturbed, RunEnded).weights_sha256


def test_an_unreadable_device_loses_updates(make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert (only(seen, RunEnded).weights_sha256, updates_of(seen)) == (uninterrupted, list(range(1, 15)))


def test_an_instance_that_cannot_write_a_snapshot_trains_on() -> None:
    taken: List[bool] = []
    gather = lambda is_needed: taken.append(is_needed) or {"weights": {}}  # noqa: E731
    state: Any = SimpleNamespace(gather=gather, memory_format=lambda: None)
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
    assert newest_valid(storage.checkpoints_folder(plan.run_dir))[0].update == 8  # type: ignore[union-attr]


def test_a_process_that_keeps_its_device_is_lost(make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_training: Any) -> None:
        raise poptorch.Error("Application runtime error: the device is in an error state")

    monkeypatch.setattr(poptorch.PoplarExecutor, "detachFromDevice", fails)
    with pytest.raises(RuntimeError, match="cannot be released after a failed call: Application runtime error"):
        events_of(plan_for(make, "tiny"), DisconnectingFleet(plan_for(make, "tiny")))


LARGEST_SEED = (1 << 64) - 1


class Model:
    """A training model of PopTorch: no attribute of the emulation, and no random state before it is compiled."""

    def __init__(self, compiled: Optional[List[int]] = None) -> None:
        self._state = compiled

    def isCompiled(self) -> bool:
        return self._state is not None

    def compile(self, *inputs: Any) -> None:
        self._state = [0]

    @property
    def rng_state(self) -> List[int]:
        if self._state is None:
            raise poptorch.Error("Model has not been compiled or has been destroyed.")
        return self._state

    @rng_state.setter
    def rng_state(self, state: List[int]) -> None:
        assert self.rng_state, "it is compiled"
        self._state = list(state)


def run(folder: Path, *flags: str) -> Dict[str, Any]:
    text = folder.parent / "text.txt"
    text.write_text("one two three " * 100)
    common = ["--task", "language-model", "--text", str(text), "--sequence-length", "16", "--dropout", "0.2"]
    common += ["--batch-size", "2", "--replicas", "2", "--lr-schedule", "constant"]
    inline = ["--fleet", "inline", "--device", "emulated"]
    assert train.main([*common, *inline, "--run-dir", str(folder), *flags]) == 0
    summary: Dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


@pytest.fixture
def only_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated SDK has the methods of PopTorch only."""
    for name in ("emulatedReplicaState", "loadEmulatedReplicaState"):
        monkeypatch.delattr(f"poptorch.executor.measurements.Measurements.{name}")


def test_a_resumed_run_continues_its_random_numbers(tmp_path: Path, only_own: None) -> None:
    whole = run(tmp_path / "whole", "--updates", "4")
    run(tmp_path / "part", "--updates", "2")
    resumed = run(tmp_path / "rest", "--updates", "4", "--resume", str(tmp_path / "part"))
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    with pytest.MonkeyPatch.context() as patch:  # as checkpoints were written before
        patch.setattr(RandomStates, "gather", lambda self, training: None)
        run(tmp_path / "old", "--updates", "2")
    repeated = run(tmp_path / "repeated", "--updates", "4", "--resume", str(tmp_path / "old"))
    assert repeated["weights_sha256"] != whole["weights_sha256"]


def test_a_checkpoint_of_ipus_continues_on_the_emulation(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run(tmp_path / "emulated", "--updates", "2")
    request.getfixturevalue("only_own")
    run(tmp_path / "ipus", "--updates", "4", "--resume", str(tmp_path / "emulated"))
    (saved,) = (tmp_path / "ipus").rglob("replicas.safetensors")
    assert [state.tolist() for state in read_nested(saved)["rng_states"]] == [[42, 2]]  # of its own two updates
    request.getfixturevalue("monkeypatch").undo()
    run(tmp_path / "again", "--updates", "5", "--resume", str(tmp_path / "ipus"))


@pytest.mark.parametrize("index", [0, 1])
def test_every_instance_reads_its_whole_state_for_a_checkpoint(index: int) -> None:
    """Reading the optimizer state is a collective if it is sharded over the replicas or off the chip."""
    instance, called = object.__new__(Instance), []
    model: Any = SimpleNamespace(
        state=lambda: called.append("state") or {"weights": {}, "optimizer": {}},
        replica_state=lambda training: None,
        recorded=lambda manifest, training: manifest,
    )
    training = SimpleNamespace(isCompiled=lambda: True, copyWeightsToHostIfNeeded=lambda: called.append("weights"))
    random_states: Any = SimpleNamespace(gather=lambda training: called.append("random numbers"))
    instance.__dict__.update(
        _training=training,
        _state=TrainingState(model, training, random_states),
        _saves=SimpleNamespace(begin=lambda manifest, state: called.append("begin")) if index == 0 else None,
        _model=model,
        _update=7,
    )
    instance.save(SimpleNamespace(update=7))  # type: ignore[arg-type]
    assert called == ["weights", "state", "random numbers", *(["begin"] if index == 0 else [])]


def test_every_instance_gets_its_own_state_once_its_model_is_compiled(make: Callable[..., Plan]) -> None:
    plan = make(pod={"num_instances": 2})
    own: List[Any] = []
    first, second = (RandomStates(plan, index, lambda state: own.append(state) or own) for index in (0, 1))
    first.gather(Model([LARGEST_SEED, 1]))
    saved = second.gather(Model([LARGEST_SEED, 2]))
    models = [Model(), Model()]
    for states, model in zip((first, second), models):
        states.load(model, saved)
        states.compile(model, ())
        states.load(model, saved)  # of a compiled model, as after a roll-back
    assert [model.rng_state for model in models] == [[LARGEST_SEED, 1], [LARGEST_SEED, 2]]
    own.clear()
    other = RandomStates(make(pod={"num_instances": 1}), 0, list)
    with pytest.warns(UserWarning, match="those of 2 instances, 4 replicas .*: the random numbers begin again"):
        other.load(models[0], saved)
    assert first.gather(Model()) is None
