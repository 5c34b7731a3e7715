"""Elastic runs of a scripted fleet: hosts are lost and return, and what else happens meanwhile."""

from __future__ import annotations

import dataclasses
import math
import signal
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import pytest
import torch

from raypod import errors
from raypod.events import (
    CallReport,
    CheckpointSaved,
    EpochDone,
    EvaluationDone,
    EvaluationReport,
    Event,
    InstanceLost,
    InstanceStarted,
    InstanceWarned,
    Repaired,
    Resized,
    RunEnded,
    SaveReport,
    UpdateDone,
)
from raypod.plan.cluster import Cluster, Host
from raypod.plan.elastic import Room
from raypod.plan.plan import Plan, Segment, make_plan
from raypod.plan.resolve import from_values
from raypod.runs import run_folder, verify_data
from raypod.runs.metrics import MetricsAggregator
from raypod.runs.sinks import Sinks
from raypod.runtime.coordinator import coordinator
from raypod.runtime.coordinator.stop import Stop
from raypod.runtime.workers.fleet import FleetBroken
from raypod.runtime.workers.scripted import ScriptedFleet
from raypod.training.checkpoint import storage, writer
from raypod.training.checkpoint.format import Retention
from raypod.training.tasks.registry import facts_of
from tests.support.scripted_runs import broken, lost, of, only, updates_of

HOSTS = "abcd"
WEIGHTS = {"weight": torch.zeros(2)}


def plan_on(folder: Path, updates: int = 40, training: Any = None, run: Any = None, **pod: Any) -> Plan:
    """8 replicas on 4 hosts with one instance each, and a checkpoint every 10 updates."""
    cluster = Cluster("pod", tuple(Host(name, name) for name in HOSTS))
    pod = {"replicas": 8, "num_instances": 4, "elastic": True, **pod}
    training = {"updates": updates, "batch_size": 2, **(training or {})}
    config = from_values({"training": training, "pod": pod, "run": {"checkpoint_every": "10 updates", **(run or {})}})
    plan = make_plan(config, cluster, facts_of(config), str(folder / "run"))
    run_folder.create(plan)
    return plan


def lost_on(*instances: int) -> FleetBroken:
    return broken(*(lost(each, host=HOSTS[each]) for each in instances))


class Pod(ScriptedFleet):
    """An elastic fleet whose hosts are `there`. It loses an instance at the update `fails_at` with its host."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.there = list(HOSTS)
        self.fails_at = {13: (3,)}  # update: instances
        self.returns_at: Dict[int, str] = {}  # update: host
        self.broken_resizes: List[Exception] = []
        self.broken_saves: List[FleetBroken] = []
        self.wait_stops = 0  # the signal that arrives during a wait
        self.waits_only_for_lost_hosts = False
        self.saved_on: List[int] = []

    def call(self, method: str, *arguments: Any) -> List[Any]:
        if method == "save":
            self.called.append(method)
            self._saves = (self._written(arguments[0]),)
            return [None] * len(self._instances)
        results = super().call(method, *arguments)
        return [writer.tensors.weights_sha256(WEIGHTS)] * len(results) if method == "seed_weights" else results

    def _written(self, manifest: Any) -> SaveReport:
        folder = storage.checkpoints_folder(self._plan.run_dir)
        found = writer.write_checkpoint(folder, manifest, writer.State(WEIGHTS, {}), Retention(3))
        return SaveReport(manifest.update, str(found.path), found.manifest.weights_sha256, None)

    def run(self, segment: Segment, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        for report in super().run(segment, stop_requested):
            if report.first_update in self.returns_at:
                self.there.append(self.returns_at.pop(report.first_update))
            if report.first_update in self.fails_at:
                instances = self.fails_at.pop(report.first_update)
                hosts = self.hosts()
                self.there = [host for host in self.there if host not in [hosts[each] for each in instances]]
                self.position = report.first_update
                raise lost_on(*instances)
            yield report

    def repair(self, instances: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        assert not may_share_hosts
        raise errors.HostLost(self.hosts()[instances[0]], instances, "no other host responds", "the log")

    def release(self, survivors: Sequence[int]) -> Dict[int, int]:
        return dict.fromkeys(survivors, self.position)

    def call_on(self, instances: Sequence[int], method: str, *arguments: Any) -> Dict[int, Any]:
        if method == "save_kept":
            if self.broken_saves:
                raise self.broken_saves.pop()
            self.saved_on += instances
            return {each: (self._written(arguments[0]),) for each in instances}
        return {each: {"has_file": True, "finish_saves": ()}.get(method) for each in instances}

    def room(self) -> List[Room]:
        return [Room(host, 2) for host in sorted(self.there)]

    def wait_for_room(self, is_enough: Callable[[List[Room]], bool], stop_requested: Callable[[], bool]) -> List[Room]:
        if self.waits_only_for_lost_hosts:
            assert is_enough(self.room()) is (len(self.there) == len(HOSTS))
        if self.wait_stops:
            signal.raise_signal(self.wait_stops)
            assert stop_requested()
        return self.room()

    def resize(self, plan: Plan) -> List[InstanceStarted]:
        called = self.called
        if self.broken_resizes:
            raise self.broken_resizes.pop()
        super().__init__(plan)
        self.called = called
        return self.started()

    def has_room_for(self, instances: Tuple[int, ...], may_share_hosts: bool) -> bool:
        return not instances


def recorded(fleet: ScriptedFleet, stop: Optional[Stop] = None) -> List[Event]:
    found, plan = [], fleet._plan
    with Sinks(plan) as sinks:
        for event in coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0), stop=stop):
            sinks.on_event(event)
            found.append(event)
    return found


def newest_update(fleet: ScriptedFleet) -> int:
    return storage.list_checkpoints(storage.checkpoints_folder(fleet._plan.run_dir))[0][0].update


def changes(events: List[Event]) -> List[Tuple[int, int, int, str]]:
    found = of(events, Resized)
    return [(each.update, each.replicas, each.gradient_accumulation, "".join(each.hosts)) for each in found]


def test_the_run_continues_after_the_update_of_a_survivor_and_grows_at_the_next_checkpoint(tmp_path: Path) -> None:
    fleet = Pod(plan_on(tmp_path))
    fleet.returns_at, fleet.waits_only_for_lost_hosts = {21: "d"}, True
    events = recorded(fleet)
    assert changes(events) == [(13, 4, 2, "ab"), (30, 8, 1, "abcd")]
    assert updates_of(events) == list(range(1, 41))
    assert ([event.update for event in of(events, CheckpointSaved)], fleet.saved_on) == ([13, 30, 40], [0])
    repairs = [(each.update, each.generation, each.restarts, len(each.lost)) for each in of(events, Repaired)]
    assert repairs == [(13, 2, 1, 2), (30, 3, 1, 4)]
    sizes = [(each["update"], each["replicas"], each["gradient_accumulation"]) for each in events[-1].resizes]
    assert (sizes, only(events, RunEnded)) == ([(13, 4, 2), (30, 8, 1)], events[-1])


def test_a_state_that_no_disk_takes_before_the_first_checkpoint_ends_the_run(tmp_path: Path) -> None:
    class Full(Pod):
        def _written(self, manifest: Any) -> SaveReport:
            if manifest.update != 5:  # a run that began again would complete
                return super()._written(manifest)
            return SaveReport(5, "update-5", "", "no space", can_pass=True)

    fleet = Full(plan_on(tmp_path))
    fleet.fails_at = {5: (3,)}
    with pytest.raises(errors.CheckpointNotSaved, match="update-5.*no space.*there is no earlier checkpoint"):
        recorded(fleet)
    assert fleet.saved_on == [0]


@pytest.mark.parametrize(("code", "other"), [("sources", "b"), ("versions", (("torch", "2.0.1"),))])
def test_a_returned_host_with_other_code_is_skipped(tmp_path: Path, code: str, other: Any) -> None:
    class OtherFiles(Pod):
        def started(self) -> List[InstanceStarted]:
            has_returned = self._plan.geometry.num_instances == len(HOSTS) and not self.fails_at
            changed = {"d": {code: other}} if has_returned else {}
            return [dataclasses.replace(each, **changed.get(each.host, {})) for each in super().started()]

    fleet = OtherFiles(plan_on(tmp_path))
    fleet.returns_at = {17: "d"}
    events = recorded(fleet)
    (warning,) = of(events, InstanceWarned)
    assert warning.text.startswith("host d is skipped: raypod's files or torch there differ from the run's; `raypod up")
    assert changes(events)[-1][3] == "ab"  # 8 replicas do not divide by three hosts
    assert only(events, RunEnded).updates == 40


def test_a_host_that_returns_in_time_leaves_the_bits_as_they_are(tmp_path: Path) -> None:
    class Returns(Pod):
        def wait_for_room(self, is_enough: Any, stop_requested: Callable[[], bool]) -> List[Room]:
            assert not is_enough(self.room())
            assert not stop_requested()
            self.there.append("d")
            assert is_enough(self.room())
            return self.room()

    events = recorded(Returns(plan_on(tmp_path, wait_hosts=60)))
    assert (changes(events), updates_of(events)) == ([], list(range(1, 41)))
    assert [(each.update, each.restarts) for each in of(events, Repaired)] == [(13, 1)]
    assert of(events, RunEnded)[0].resizes == ()


class Fixed(Pod):
    """Emulated instances of a run that is not elastic; another host can take them if `has_spare`."""

    has_spare = False

    def repair(self, instances: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        return {0: self.position} if self.has_spare else super().repair(instances, False)


def test_an_instance_that_another_host_takes_changes_no_size_and_without_elastic_the_run_ends(tmp_path: Path) -> None:
    fleet = Fixed(plan_on(tmp_path))
    fleet.has_spare = True
    events = recorded(fleet)
    assert (changes(events), updates_of(events)) == ([], list(range(1, 41)))
    assert only(events, Repaired).update == 13
    with pytest.raises(errors.HostLost, match="host d is lost, with instance 3: no other host responds"):
        recorded(Fixed(plan_on(tmp_path / "other", elastic=False)))


@pytest.mark.parametrize(("action", "host"), [("IPU_RESET", "b"), ("PARTITION_RESET", "a")])
def test_failed_devices_are_reset_on_the_hosts_that_are_left(action: str, host: str, tmp_path: Path) -> None:
    class Failed(Pod):
        """The devices of the hosts b and c fail as d is lost."""

        def run(self, segment: Segment, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
            try:
                yield from super().run(segment, stop_requested)
            except FleetBroken as error:
                failed = [lost(each, "device", host=HOSTS[each]) for each in (1, 2)]
                if action == "PARTITION_RESET":
                    failed.reverse()
                actions = [dataclasses.replace(each, recovery_action=action) for each in failed]
                raise broken(*error.losses, *actions) from error

        def call_on(self, instances: Sequence[int], method: str, *arguments: Any) -> Dict[int, Any]:
            if method != "reset_devices":
                return super().call_on(instances, method, *arguments)
            self.called += [f"{arguments[1]} on {self.hosts()[each]}" for each in instances]
            return dict.fromkeys(instances, "")

    fleet = Failed(plan_on(tmp_path, run={"reset_command": "reset it"}))
    events = recorded(fleet)
    assert changes(events) == [(13, 4, 2, "ab")]
    assert only(events, Repaired).reset_on == (host,)
    done = [each for each in fleet.called if "RESET" in each or each == "seed_weights"]
    assert done == ["seed_weights", f"{action} on {host}", "seed_weights"]


def test_an_instance_that_is_lost_while_it_saves_is_replaced_by_another_survivor(tmp_path: Path) -> None:
    fleet = Pod(plan_on(tmp_path))
    fleet.broken_saves = [lost_on(0)]
    events = recorded(fleet)
    assert (fleet.saved_on, [event.instance for event in of(events, InstanceLost)]) == ([1], [3, 0])
    assert updates_of(events) == list(range(1, 41))


def test_without_a_survivor_the_newest_checkpoint_counts(tmp_path: Path) -> None:
    fleet = Pod(plan_on(tmp_path))
    fleet.fails_at, fleet.room = {13: (0, 1, 2, 3)}, lambda: [Room("a", 2)]  # type: ignore[method-assign]
    events = recorded(fleet)
    assert (changes(events), fleet.saved_on) == ([(10, 2, 4, "a")], [])
    assert updates_of(events) == [*range(1, 14), *range(11, 41)], "other replicas have other bits"


class Changed(Pod):
    """All instances are lost at update 24, with the checkpoint of 22; on one host the values are others."""

    loss_on_one_host, damaged = 7.0, (22,)

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.fails_at, self.value = {24: (0, 1, 2, 3)}, 0.5

    def room(self) -> List[Room]:
        for update in self.damaged:
            path = storage.checkpoint_path(storage.checkpoints_folder(self._plan.run_dir), update)
            (path / "weights.safetensors").write_bytes(b"")
        self.value = self.loss_on_one_host
        return [Room("a", 2)]

    def call(self, method: str, *arguments: Any) -> List[Any]:
        if method != "evaluate":
            return super().call(method, *arguments)
        sums = ((self.value,), (1.0,)) * len(self._plan.task.metrics)
        return [EvaluationReport(index, 1, sums) for index in self._instances]

    def _report(self, instance: int, update: int) -> CallReport:
        report = super()._report(instance, update)
        value = ((self.value, 1.0) * len(self._plan.task.metrics),)
        return dataclasses.replace(report, sums=(value * len(report.sums[0]),))


def test_nothing_remains_of_weights_that_no_instance_and_no_checkpoint_has(tmp_path: Path) -> None:
    plan = plan_on(tmp_path, training={"batch_size": 16, "evaluate_every": 1})
    assert plan.updates_per_epoch == 11
    events = recorded(Changed(plan))
    assert [each.update for each in of(events, Repaired)] == [20]
    folder = Path(plan.run_dir)
    lines = run_folder.measured(UpdateDone, folder / "metrics.jsonl")
    assert [each.update for each in lines] == list(range(1, 41))
    assert [each.loss for each in lines] == [0.5] * 20 + [7.0] * 20
    tested = run_folder.measured(EvaluationDone, folder / "evaluations.jsonl")
    assert [(each.update, each.metrics["loss"]) for each in tested] == [(11, 0.5), (22, 7.0), (33, 7.0), (40, 7.0)]
    found, _ = storage.list_checkpoints(folder / "checkpoints")
    known = {each.update: each.manifest.tested.get("loss") for each in found}
    assert known[40] == 7.0
    assert 0.5 not in known.values()
    assert [each.epoch for each in of(events, EpochDone)] == [1, 2, 2, 3]


def test_a_loss_that_is_not_finite_in_repeated_updates_ends_the_run(tmp_path: Path) -> None:
    fleet = Changed(plan_on(tmp_path))
    fleet.fails_at, fleet.loss_on_one_host, fleet.damaged = {13: (0, 1, 2, 3)}, math.nan, ()
    with pytest.raises(errors.LossNotFinite, match="update 11"):
        recorded(fleet)


@pytest.mark.parametrize(
    "error", [lost_on(1), errors.ClusterError("the Ray node of b has ended"), FleetBroken((), "refused")]
)
def test_a_failed_start_is_a_restart_and_too_many_of_them_end_the_run(tmp_path: Path, error: Exception) -> None:
    fleet = Pod(plan_on(tmp_path, min_hosts=1))
    fleet.broken_resizes = [error]
    events = recorded(fleet)
    assert (changes(events), [each.restarts for each in of(events, Repaired)]) == ([(13, 4, 2, "ab")], [2])
    fleet = Pod(plan_on(tmp_path / "other"))
    fleet.broken_resizes = [lost_on(1)] * 4
    with pytest.raises(errors.InstanceFailed, match="limit --max-restarts 3 is reached"):
        recorded(fleet)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_too_few_hosts_end_the_run_with_one_line_and_a_checkpoint(tmp_path: Path, is_stopped: bool) -> None:
    fleet = Pod(plan_on(tmp_path, min_hosts=3))
    fleet.wait_stops = signal.SIGTERM if is_stopped else 0
    with pytest.raises(KeyboardInterrupt if is_stopped else errors.HostLost) as caught:
        recorded(fleet)
    message = "host d is lost, with instance 3: no power of two of replicas can continue on the hosts that respond: "
    message += "a (2), b (2), c (2); --min-hosts 3: a plan of 4 replicas uses 2"
    assert is_stopped or (str(caught.value).startswith(message) and "\n" not in str(caught.value))
    assert newest_update(fleet) == 13


@pytest.mark.parametrize("grace_s", [None, 60.0])
def test_a_preemption_while_a_host_is_awaited_leaves_a_checkpoint(tmp_path: Path, grace_s: Optional[float]) -> None:
    fleet, stop = Pod(plan_on(tmp_path)), Stop()
    fleet.wait_stops, stop.grace_s = signal.SIGUSR1, grace_s
    if grace_s is not None:  # no time to start instances that would only end
        with pytest.raises(
            errors.Preempted, match="the checkpoint of update 13 is written; the same command continues"
        ):
            recorded(fleet, stop)
    else:
        events = recorded(fleet, stop)
        assert changes(events) == [(13, 4, 2, "ab")]
        assert of(events, RunEnded)[0].preempted
    assert newest_update(fleet) == 13


def test_a_host_that_is_drained_is_left(tmp_path: Path) -> None:
    class Drained(Pod):
        drains = False

        def draining(self) -> List[str]:
            return ["b"] if "b" in self.hosts() and self.drains else []

        def run(self, segment: Segment, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
            for report in super().run(segment, stop_requested):
                yield report
                self.drains = self.drains or (report.first_update, report.instance) == (14, 3)

        def room(self) -> List[Room]:
            return [each for each in super().room() if each.host != "b" or not self.drains]

    fleet = Drained(plan_on(tmp_path))
    fleet.fails_at = {}
    events = recorded(fleet)
    assert (changes(events), of(events, Resized)[0].cause) == ([(15, 4, 2, "ac")], "Ray drains host b")
    assert ([each.restarts for each in of(events, Repaired)], updates_of(events)) == ([0], list(range(1, 41)))


class Late(Pod):
    def start(self) -> List[InstanceStarted]:
        raise errors.PodTooSmall("pod: no Ray node is alive on c, d")


def test_a_run_starts_on_the_hosts_that_have_joined(tmp_path: Path) -> None:
    fleet = Late(plan_on(tmp_path))
    fleet.there, fleet.fails_at, fleet.returns_at = ["a", "b"], {}, {11: "c", 21: "d"}
    events = recorded(fleet)
    assert of(events[:1], Resized)[0].cause == "pod: no Ray node is alive on c, d"
    assert changes(events) == [(0, 4, 2, "ab"), (30, 8, 1, "abcd")]
    assert updates_of(events) == list(range(1, 41))
    note = "generation 2 began after update 30: 0 superseded; 8 replicas x accumulation 1"
    assert note in "\n".join(verify_data.verify(tmp_path / "run").lines)  # a scripted fleet reports no digests


class Forgetful(Pod):
    """Other hosts take lost instances, if all are lost; no instance has a state then."""

    has_spare = True

    def repair(self, instances: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        if self.has_spare and len(instances) == len(self.hosts()):
            return {}
        return super().repair(instances, may_share_hosts)


@pytest.mark.parametrize("has_spare", [True, False])
def test_the_record_stays_if_all_are_lost_before_the_first_checkpoint(tmp_path: Path, has_spare: bool) -> None:
    class Pods(Forgetful, Late):
        def room(self) -> List[Room]:
            return [Room("a", 2), Room("b", 2)]

    fleet = Pods(plan_on(tmp_path))
    fleet.fails_at, fleet.has_spare = {3: (0, 1)}, has_spare
    events = recorded(fleet)
    assert (changes(events), [each.update for each in of(events, Repaired)]) == ([(0, 4, 2, "ab")], [0])
    assert only(events, RunEnded).resizes == ({"update": 0, "replicas": 4, "gradient_accumulation": 2},)


@pytest.mark.parametrize("has_grown", [False, True])
def test_a_rollback_before_a_change_is_recorded_where_training_continues(tmp_path: Path, has_grown: bool) -> None:
    class Damages(Forgetful):
        def repair(self, instances: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
            if len(instances) == len(self.hosts()):
                for update in (13, 20):
                    (storage.checkpoint_path(checkpoints, update) / "weights.safetensors").write_bytes(b"")
            return super().repair(instances, may_share_hosts)

    fleet = Damages(plan_on(tmp_path))
    checkpoints = storage.checkpoints_folder(fleet._plan.run_dir)
    fleet.fails_at = {13: (3,), 24: (0, 1, 2, 3) if has_grown else (0, 1)}
    fleet.returns_at = {16: "d"} if has_grown else {}
    events = recorded(fleet)
    assert changes(events) == [(13, 4, 2, "ab"), *([(20, 8, 1, "abcd")] if has_grown else [])]
    assert [each.update for each in of(events, Repaired)][-1] == 10
    expected = () if has_grown else ({"update": 10, "replicas": 4, "gradient_accumulation": 2},)
    assert only(events, RunEnded).resizes == expected


@pytest.mark.parametrize("pod", [{"elastic": False}, {"min_hosts": 3}])
def test_a_run_without_enough_hosts_does_not_start(tmp_path: Path, pod: Dict[str, Any]) -> None:
    fleet = Late(plan_on(tmp_path, **pod))
    fleet.there = ["a", "b"]
    with pytest.raises(errors.ClusterError, match="no Ray node is alive on c, d"):
        recorded(fleet)
