"""The failure policy, and repairs of a scripted fleet whose losses are made up."""

from __future__ import annotations

import dataclasses
import math
import signal
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import pytest

from raypod.errors import CheckpointDamaged, ConfigError, DataMissing, HostLost, InstanceFailed, RaypodError
from raypod.events import (
    CallReport,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    InstanceLost,
    InstanceStarted,
    Repaired,
    RunEnded,
    SaveReport,
    UpdateDone,
)
from raypod.plan.plan import Plan, Segment
from raypod.runs.metrics import MetricsAggregator
from raypod.runtime.coordinator import coordinator
from raypod.runtime.coordinator.recovery import REFILL_S, FailurePolicy, newest, receivers
from raypod.runtime.workers.fleet import FleetBroken
from raypod.runtime.workers.scripted import ScriptedFleet
from raypod.training.checkpoint import storage
from raypod.training.checkpoint.resume import newest_valid
from tests.support.saved_runs import flip_a_bit, save
from tests.support.scripted_runs import Breaks, broken, events_of, lost, of, only, updates_of

Make = Callable[..., Plan]


# ---- the policy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "losses", "replaced"),
    [("emulated", [lost(2), lost(0)], (0, 2)), ("ipu", [lost(1)], (1,)), ("ipu", [], ())],
)
def test_the_lost_are_replaced_in_order(device: str, losses: List[InstanceLost], replaced: Tuple[int, ...]) -> None:
    decision = FailurePolicy(device, 1).decide(broken(*losses), 10, 0.0)
    assert (decision.replace, decision.may_share_hosts, decision.error) == (replaced, device == "emulated", None)


def test_the_error_after_the_last_restart_names_the_first_cause() -> None:
    policy = FailurePolicy("emulated", 2)
    for instance in (0, 1):
        assert policy.decide(broken(lost(instance)), instance, 0.0).error is None
    error = policy.decide(broken(lost(2, "silent", "silent for 16 s"), lost(0)), 5, 0.0).error
    assert isinstance(error, InstanceFailed)
    assert (error.instance, error.host, policy.restarts) == (2, "h2", 2)
    assert str(error).startswith("instance 2 on host h2 failed: silent for 16 s (not repaired: the limit --max-res")
    assert "the first failure was: instance 0 on host h0 failed" in str(error)
    alone = FailurePolicy("emulated", 0).decide(broken(lost(1)), 5, 0.0).error
    assert str(alone) == "instance 1 on host h1 failed: its process died; its log: instance-1.log"
    assert "lost their connections" in str(FailurePolicy("emulated", 0).decide(broken(), 5, 0.0).error)


@pytest.mark.parametrize(("later_s", "ends"), [(REFILL_S - 1, True), (REFILL_S, False)])
def test_an_hour_without_a_failure_restores_all_restarts(later_s: float, ends: bool) -> None:
    policy = FailurePolicy("emulated", 1)
    policy.decide(broken(lost(0)), 1, 100.0)
    error = policy.decide(broken(lost(0)), 900, 100.0 + later_s).error
    assert (error is not None) is ends
    same = "is reached; the first failure had the same cause); its log: instance-0.log"
    assert error is None or str(error).endswith(same)


def test_the_same_exception_at_the_same_update_ends_the_run() -> None:
    policy = FailurePolicy("emulated", 9)
    raised = broken(lost(1, "raised", "ValueError: no such layer"))
    for failure, update in ((raised, 7), (raised, 8), (broken(lost(1, "raised", "OSError: no disk")), 8)):
        assert policy.decide(failure, update, 0.0).error is None
    error = str(policy.decide(raised, 8, 0.0).error)
    assert "ValueError: no such layer (the same happened at update 8 before)" in error
    deaths = FailurePolicy("emulated", 9)
    assert [deaths.decide(broken(lost(1)), 8, 0.0).error for _ in range(2)] == [None, None]


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("FULL_RESET", "the SDK requires FULL_RESET: power-cycle the system of this host"),
        ("UNRECOVERABLE", "the SDK calls it unrecoverable: take this host out of the cluster file"),
        ("IPU_RESET", None),
        ("", None),
    ],
)
def test_the_recovery_action_of_a_failed_device_decides(action: str, reason: Optional[str]) -> None:
    failed = dataclasses.replace(lost(2, "device", "the device has failed"), recovery_action=action)
    policy = FailurePolicy("ipu", 3)
    decisions = [policy.decide(broken(lost(1), failed), 7, 0.0) for _ in range(2)]  # not the same exception
    if reason is None:
        assert [each.replace for each in decisions] == [(1, 2), (1, 2)]
    else:
        assert str(decisions[0].error).startswith(f"instance 2 on host h2 failed: the device has failed ({reason}")
        assert policy.restarts == 0


def device_failure(instance: int, action: str, host: str = "") -> InstanceLost:
    return dataclasses.replace(lost(instance, "device", "the device has failed", host), recovery_action=action)


@pytest.mark.parametrize(
    ("losses", "resets"),
    [
        ([device_failure(2, "PARTITION_RESET"), device_failure(1, "IPU_RESET")], [2]),
        ([device_failure(index, "IPU_RESET", host) for index, host in ((3, "a"), (1, "b"), (2, "a"))], [1, 3]),
        ([device_failure(1, "LINK_RESET"), device_failure(2, "FULL_RESET")], [2]),
        ([lost(0), device_failure(1, ""), lost(2)], []),
        ([device_failure(1, "UNRECOVERABLE"), device_failure(2, "IPU_RESET")], None),
    ],
)
def test_a_reset_is_due_once_per_host_or_partition(losses: List[InstanceLost], resets: Optional[List[int]]) -> None:
    decision = FailurePolicy("ipu", 3, can_reset=True).decide(broken(*losses), 7, 0.0)
    assert (decision.error is not None) is (resets is None)
    assert [loss.instance for loss in decision.resets] == (resets or [])


def test_without_a_reset_command_the_last_restart_names_it() -> None:
    error = str(FailurePolicy("ipu", 1).decide(broken(device_failure(1, "PARTITION_RESET")), 5, 0.0).error)
    assert "--reset-command" not in error
    policy = FailurePolicy("ipu", 1)
    for _ in range(2):
        error = str(policy.decide(broken(device_failure(1, "PARTITION_RESET")), 5, 0.0).error)
    assert "; the SDK requires PARTITION_RESET: --reset-command executes it)" in error


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
def test_the_newest_survivor_is_the_root(positions: Dict[int, int], root: Optional[int], receiving: List[int]) -> None:
    assert newest(positions) == root
    assert root is None or receivers(positions, root, 4) == receiving


# ---- repairs --------------------------------------------------------------------------------------------------------


def plan_of(make: Make, updates: int = 4, instances: int = 2, **run: Any) -> Plan:
    pod = {"replicas": 4, "num_instances": instances}
    return make(training={"updates": updates}, pod=pod, run={"checkpoint_every": "9 updates", **run})


@pytest.mark.parametrize(("lost_one", "saves", "seeded_from"), [(0, 2, "instance 2"), (1, 1, "instance 0")])
def test_only_a_lost_checkpoint_is_written_again(make: Make, lost_one: int, saves: int, seeded_from: str) -> None:
    plan = plan_of(make, instances=4)
    repairs: List[Any] = [{0: 4}] if lost_one else [broken(lost(1)), {2: 4, 3: 4}]
    fleet = Breaks(plan, in_call={"finish_saves": broken(lost(lost_one))}, repairs=repairs)
    events = events_of(plan, fleet)
    assert fleet.repaired == [(1,)] if lost_one else [(0,), (1,)]
    assert fleet.called.count("save") == saves
    repaired = only(events, Repaired)
    assert (repaired.lost, repaired.seeded_from, repaired.update) == ((1,) if lost_one else (0, 1), seeded_from, 4)
    assert [event.update for event in of(events, CheckpointSaved)] == [4]
    assert only(events, RunEnded).checkpoint == "update-4"


def test_a_run_that_loses_all_at_its_end_trains_again_but_not_over_checkpoints_that_cannot_be_read(make: Make) -> None:
    plan = plan_of(make)
    fleet = Breaks(plan, in_call={"finish_saves": broken(lost(0))}, repairs=[{}])
    events = events_of(plan, fleet)
    repaired, ended = only(events, Repaired), only(events, RunEnded)
    assert (repaired.seeded_from, repaired.update) == ("the beginning", 0)
    assert (fleet.called.count("save"), fleet.called[-2:]) == (2, ["finish_saves", "evaluate"])
    assert (ended.updates, ended.checkpoint, events[-1]) == (4, "update-4", ended)
    plan = plan_of(make)
    flip_a_bit(save(plan, 2).path / "weights.safetensors")
    fleet = Breaks(plan, {(3, 0): broken(lost(0), lost(1))}, repairs=[{}])
    with pytest.raises(CheckpointDamaged, match="no checkpoint that can be read: .*update-00000002 is damaged"):
        events_of(plan, fleet)
    assert fleet.called.count("seed_weights") == 1


class Loads(Breaks):
    """Instances have the weights of the checkpoint that they loaded last."""

    loaded = "0" * 64

    def call(self, method: str, *arguments: Any) -> List[Any]:
        results = super().call(method, *arguments)
        if method == "load_checkpoint":
            self.loaded = arguments[1].manifest.weights_sha256
        return [self.loaded for _ in results] if method == "seed_weights" else results


def test_a_run_that_went_back_never_continues_from_the_later_checkpoints(make: Make) -> None:
    plan = plan_of(make, updates=20)
    back, *_ = [save(plan, update) for update in (5, 10, 15)]
    fleet = Loads(plan, {(7, 0): broken(lost(0), lost(1))}, repairs=[{}])
    events = events_of(plan, fleet, resumed=back)
    assert (only(events, Repaired).update, updates_of(events)) == (5, list(range(6, 21)))
    checkpoints = storage.checkpoints_folder(plan.run_dir)
    newest, damaged = newest_valid(checkpoints)
    assert (newest and newest.age, damaged) == ((2, 5), [])
    assert storage.latest_name(Path(plan.run_dir)) == "update-00000005"


def test_a_run_that_went_back_past_a_damaged_checkpoint_does_not_continue_from_it_later(make: Make) -> None:
    plan = plan_of(make, updates=20)
    save(plan, 5)
    weights = save(plan, 10).path / "weights.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(b"")
    fleet = Loads(plan, {(12, 0): broken(lost(0), lost(1))}, repairs=[{}])
    assert only(events_of(plan, fleet), Repaired).update == 5
    weights.write_bytes(content)
    assert newest_valid(storage.checkpoints_folder(plan.run_dir))[0].update == 5  # type: ignore[union-attr]


@pytest.mark.parametrize(("kind", "at", "is_repaired"), [("raised", 0, False), ("raised", 1, True), ("died", 0, True)])
def test_an_exception_before_the_first_call_ends_the_run(make: Make, kind: str, at: int, is_repaired: bool) -> None:
    plan = plan_of(make)
    failure = broken(lost(1, kind, "ValueError: no such layer"), lost(0, kind))
    fleet = Breaks(plan, {(at, 1): failure}, repairs=[{}])
    if is_repaired:
        assert only(events_of(plan, fleet), Repaired).restarts == 1
        return
    with pytest.raises(InstanceFailed, match="instance 1 on host h1 failed: ValueError: no such layer; its log"):
        events_of(plan, fleet)
    assert fleet.repaired == []


class Resets(Breaks):
    """Instances whose reset command ends for `reason`; one can be lost meanwhile."""

    reason = ""
    in_reset: Optional[FleetBroken] = None

    def call_on(self, instances: Sequence[int], method: str, *arguments: Any) -> Dict[int, Any]:
        if method != "reset_devices":
            return dict.fromkeys(instances, ())
        self.called.append(f"{method} {list(instances)} {arguments} after {self.repaired}")
        error, self.in_reset = self.in_reset, None
        if error is not None:
            raise error
        return dict.fromkeys(instances, self.reason)


@pytest.mark.parametrize("repairs", [[(1, 2, 3)], [(1, 2, 3), (3,)]])
def test_the_reset_command_runs_before_the_state_is_restored(make: Make, repairs: List[Tuple[int, ...]]) -> None:
    plan = plan_of(make, instances=4, max_restarts=9, reset_command="reset it", reset_timeout_s=7)
    failure = broken(lost(1), device_failure(2, "PARTITION_RESET"), device_failure(3, "PARTITION_RESET"))
    fleet = Resets(plan, {(2, 0): failure}, repairs=[{0: 2} for _ in repairs])
    fleet.in_reset = broken(lost(3)) if len(repairs) > 1 else None
    events = events_of(plan, fleet)
    repaired = only(events, Repaired)
    assert (repaired.lost, repaired.update, repaired.reset_on) == ((1, 2, 3), 2, (fleet.hosts()[2],))
    assert updates_of(events) == [1, 2, 3, 4]
    done = [each for each in fleet.called if each.startswith("reset") or each == "seed_weights"][1:]
    command = "reset_devices [2] ('reset it', 'PARTITION_RESET', 7.0) after "
    assert done == [*(f"{command}{repairs[: number + 1]}" for number in range(len(repairs))), "seed_weights"]


def test_a_reset_command_that_fails_ends_the_run(make: Make) -> None:
    plan = plan_of(make, max_restarts=9, reset_command="reset it")
    fleet = Resets(plan, {(2, 0): broken(device_failure(1, "FULL_RESET"))}, repairs=[{0: 2}])
    fleet.reason = "exit code 3: no such partition"
    match = "the device has failed; the reset command 'reset it' on host .* has failed: exit code 3: no such partition;"
    with pytest.raises(InstanceFailed, match=match):
        events_of(plan, fleet)
    assert fleet.repaired == [(1,)]


class Holds(Loads):
    """Instances keep their state; a checkpoint is written as it is requested."""

    kept_at = 0  # the update of the state of all instances that are asked for it
    save_error: Optional[str] = None

    def release(self, survivors: Sequence[int]) -> Dict[int, int]:
        self.called.append(f"release {list(survivors)}")
        return dict.fromkeys(survivors, self.kept_at)

    def call_on(self, instances: Sequence[int], method: str, *arguments: Any) -> Dict[int, Any]:
        if method != "save_kept":
            return dict.fromkeys(instances, True if method == "has_file" else ())
        saved = save(self._plan, arguments[0].update)
        report = SaveReport(saved.update, str(saved.path), saved.manifest.weights_sha256, self.save_error)
        return dict.fromkeys(instances, (report,))


def ended_by(plan: Plan, fleet: ScriptedFleet) -> Tuple[List[Event], Exception]:
    events: List[Event] = []
    with pytest.raises(RaypodError) as caught:
        events.extend(coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0)))
    return events, caught.value


@pytest.mark.parametrize(
    ("error", "holders"),
    [
        (broken(lost(1)), [0, 2, 3]),
        (broken(lost(1, "stuck"), lost(2, "raised", "OSError: a bad disk")), [0, 2, 3]),
        (broken(), [0, 1, 2, 3]),
        (DataMissing("cannot read the image"), [0, 1, 2, 3]),
        (HostLost("h3", (3,), "no power", "the log"), [0, 1, 2, 3]),
    ],
)
def test_an_error_that_ends_the_run_leaves_a_newest_checkpoint(make: Make, error: Any, holders: List[int]) -> None:
    plan = plan_of(make, updates=20, instances=4, max_restarts=0)
    fleet = Holds(plan, {(12, 0): error})
    fleet.kept_at = 12
    events, _ = ended_by(plan, fleet)
    assert (only(events, CheckpointSaved).update, updates_of(events)[-1]) == (12, 12)
    assert fleet.called[-1] == f"release {holders}"
    assert newest_valid(storage.checkpoints_folder(plan.run_dir))[0].update == 12  # type: ignore[union-attr]


def test_a_last_checkpoint_that_cannot_be_written_does_not_hide_the_error_that_ends_the_run(make: Make) -> None:
    plan = plan_of(make, max_restarts=0)
    fleet = Holds(plan, {(2, 0): broken(lost(1))})
    fleet.kept_at, fleet.save_error = 2, "No space left on device"
    events, error = ended_by(plan, fleet)
    assert isinstance(error, InstanceFailed)
    failed = only(events, CheckpointFailed)
    assert (failed.update, failed.cause, failed.previous) == (2, "No space left on device", "")


def test_instances_that_all_raise_are_replaced_without_loss_of_their_state(make: Make) -> None:
    plan = plan_of(make, updates=20)
    raised = broken(*(lost(each, "raised", "OSError: Stale file handle") for each in (1, 0)))
    fleet = Holds(plan, {(12, 0): raised, (12, 1): raised}, repairs=[{}])
    fleet.kept_at = 12
    events, error = ended_by(plan, fleet)
    repaired = only(events, Repaired)
    assert (repaired.update, Path(repaired.seeded_from).name, repaired.lost) == (12, "update-00000012", (0, 1))
    assert updates_of(events) == list(range(1, 13))
    assert "the same happened at update 12 before" in str(error)


class LosesAReport(Breaks):
    """Instance 1 is lost after the others have completed an update and before it reports that."""

    recovered: Optional[List[CallReport]] = None  # reports that instance 0 has of instance 1

    def call(self, method: str, *arguments: Any) -> List[Any]:
        if method == "lost_reports":
            assert arguments == ([(2, 1)],)
            return [self.recovered, None]
        return super().call(method, *arguments)


@pytest.mark.parametrize("is_recovered", [True, False])
def test_a_lost_report_is_recovered_or_its_update_has_no_loss(make: Make, is_recovered: bool) -> None:
    plan = plan_of(make, updates=5, on_nonfinite="stop")
    undisturbed = of(events_of(plan, ScriptedFleet(plan)), UpdateDone)
    fleet = LosesAReport(plan, {(2, 1): broken(lost(1))}, repairs=[{0: 3}])
    if is_recovered:
        fleet.recovered = [each for each in fleet.reports(2) if each.instance == 1]
    events = events_of(plan, fleet)
    found = of(events, UpdateDone)
    assert updates_of(events) == [1, 2, 3, 4, 5]
    unknown = [] if is_recovered else [3]
    assert [event.update for event in found if event.missing_reports == (1,)] == unknown
    assert [event.update for event in found if math.isnan(event.loss)] == unknown
    same = [(event.update, event.metrics) for event in found if event.has_results]
    assert same == [(each.update, each.metrics) for each in undisturbed if each.update not in unknown]
    assert isinstance(events[-1], RunEnded)


class Drained(ScriptedFleet):
    room, moved = False, False

    def draining(self) -> List[str]:
        return [] if self.moved else ["b"]

    def hosts(self) -> List[str]:
        return ["a", "c" if self.moved else "b"]

    def has_room_for(self, instances: Tuple[int, ...], may_share_hosts: bool) -> bool:
        assert instances == (1,)
        return self.room

    def run(self, segment: Segment, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        for report in super().run(segment, lambda: False):
            yield report
            if report.instance == 1 and stop_requested():
                return

    def repair(self, lost_instances: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        self.moved = True
        return {0: 1}


@pytest.mark.parametrize("room", [True, False])
def test_a_drained_host_costs_no_restart_and_no_update(make: Make, room: bool) -> None:
    plan = plan_of(make, max_restarts=0)
    fleet = Drained(plan)
    fleet.room = room
    events = events_of(plan, fleet)
    moves = [(event.lost, event.hosts, event.restarts) for event in of(events, Repaired)]
    assert (updates_of(events), moves) == (([1, 2, 3, 4], [((1,), ("c",), 0)]) if room else ([1], []))
    ended = only(events, RunEnded)
    assert ended.checkpoint == f"update-{len(updates_of(events))}"
    assert ended.cause == ("" if room else "Ray drains host b")


def test_a_drained_host_is_left_although_the_disk_is_full(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullWhileDrained(Drained):
        room = True

        def call(self, method: str, *arguments: Any) -> List[Any]:
            results = super().call(method, *arguments)
            if method == "save" and not self.moved:
                self._saves = (SaveReport(arguments[0].update, "update", "", "no space", can_pass=True),)
            return results

    monkeypatch.setattr(coordinator.time, "sleep", lambda seconds: pytest.fail("it waits"))
    plan = plan_of(make, max_restarts=0)
    events = events_of(plan, FullWhileDrained(plan))
    assert of(events, CheckpointFailed)
    assert [each.hosts for each in of(events, Repaired)] == [("c",)]
    assert only(events, RunEnded).checkpoint == "update-4"


def test_a_replacement_with_other_files_of_raypod_is_refused(make: Make) -> None:
    class OtherFiles(Drained):
        room = True

        def started(self) -> List[InstanceStarted]:
            first, second = super().started()
            return [first, dataclasses.replace(second, sources="b" if self.moved else first.sources)]

    plan = plan_of(make, max_restarts=0)
    with pytest.raises(ConfigError, match="files on host c of instance 1 differ .* `raypod up FILE` copies the same"):
        events_of(plan, OtherFiles(plan))


class IgnoresAnException(ScriptedFleet):
    """A fleet that receives a signal in a finalizer, whose exceptions Python ignores, while it starts."""

    def start(self) -> List[InstanceStarted]:
        class Finalized:
            def __del__(self) -> None:
                signal.raise_signal(signal.SIGTERM)

        Finalized()
        return super().start()


def test_a_signal_whose_exception_is_ignored_ends_the_run_and_prints_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: List[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    plan = make()
    fleet = IgnoresAnException(plan)
    with pytest.raises(KeyboardInterrupt):
        events_of(plan, fleet)
    assert fleet.called == printed == []
    assert sys.unraisablehook == printed.append
