"""Repairs from a snapshot: which one is chosen, and what is repeated. The instances and their hosts are made up."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import pytest
import torch

from raypod.errors import InstanceFailed
from raypod.events import CallReport, EpochDone, Event, Repaired, RunEnded, UpdateDone
from raypod.plan.plan import Plan, Segment
from raypod.runs.metrics import MetricsAggregator
from raypod.runtime.coordinator import coordinator
from raypod.runtime.workers.inline import InlineServer
from raypod.training.checkpoint import snapshots, tensors
from raypod.training.checkpoint.resume import newest_valid
from raypod.training.checkpoint.snapshots import Place, SnapshotMemory
from raypod.training.checkpoint.storage import checkpoints_folder
from raypod.training.checkpoint.writer import load_checkpoint
from tests.support.saved_runs import save
from tests.support.scripted_runs import Breaks, broken, events_of, lost, of, only, updates_of

Make = Callable[..., Plan]
EVERY = 2
ALL_LOST = broken(lost(0, "device"), lost(1, "device"))


class Memory(InlineServer):
    """The process of a host; it does not answer once it is lost."""

    def __init__(self) -> None:
        self._memory, self.is_lost = SnapshotMemory(), False
        super().__init__(self._memory)

    def result(self, handle: Any, timeout_s: float) -> Any:
        if self.is_lost:
            raise ConnectionError("the host does not respond")
        return handle

    def close(self) -> None:
        self._memory.close()


class Keeps(Breaks):
    """An instance per host writes a snapshot after each second update, and loads one."""

    def __init__(self, plan: Plan, *arguments: Any, **options: Any) -> None:
        super().__init__(plan, *arguments, **options)
        self.memories: Dict[str, Memory] = {}
        self.on_hosts = ["a", "b"]
        self.loaded: List[Tuple[int, int]] = []  # instance and update
        self.places: List[Optional[Place]] = [None, None]
        self.checkpoint: Optional[str] = None  # the hash of the weights of the checkpoint that is loaded
        self.lose: Tuple[str, ...] = ()  # hosts, with the instances

    def hosts(self) -> List[str]:
        return self.on_hosts

    def serve_on(self, host: str, kind: Callable[..., Any], *arguments: Any) -> Memory:
        assert kind is SnapshotMemory
        self.memories[host] = Memory()
        return self.memories[host]

    def call(self, method: str, *arguments: Any) -> List[Any]:
        if method == "keep_snapshots":
            (self.places,) = arguments
        elif method == "load_snapshot":
            root, place, update = arguments
            assert tensors.unpack_flat(snapshots.read(place, update))["update"] == update
            self.loaded.append((root, update))
        elif method == "load_checkpoint":
            self.checkpoint = arguments[1].manifest.weights_sha256
        results = super().call(method, *arguments)
        return [self.checkpoint or "0" * 64 for _ in results] if method == "seed_weights" else results

    def run(self, segment: Segment, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        for report in super().run(segment, stop_requested):
            yield report
            self.end_call(report)

    def end_call(self, report: CallReport) -> None:
        place, update = self.places[report.instance], report.first_update + 1
        if place is not None and self._plan.config.run.has_snapshot_after(update):
            weights = {"weight": torch.full((2,), float(update))}
            state = {"weights": weights, "optimizer": {}, "ema": None, "replicas": None, "memory_format": None}
            snapshots.write(place, update, tensors.pack_flat({**state, "update": update}))

    def repair(self, lost: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        for host in self.lose:
            self.memories[host].is_lost = True
        return super().repair(lost, may_share_hosts)


def plan_of(make: Make, updates: int = 8, **run: Any) -> Plan:
    run = {"checkpoint_every": "99 updates", "snapshot_every": EVERY, **run}
    return make(training={"updates": updates}, pod={"replicas": 4, "num_instances": 2}, run=run)


@pytest.mark.parametrize(
    ("every", "survivors", "source", "update"),
    [
        (2, {}, "the snapshot of host a", 4),
        (0, {}, "the beginning", 0),
        (2, {1: 5}, "instance 1", 5),
        (2, {1: 3}, "the snapshot of host a", 4),
        (2, {0: -1}, "the snapshot of host a", 4),
    ],
)
def test_a_repair_uses_the_newest(make: Make, every: int, survivors: Dict[int, int], source: str, update: int) -> None:
    plan = plan_of(make, snapshot_every=every)
    fleet = Keeps(plan, {(5, 0): ALL_LOST}, repairs=[survivors])
    events = events_of(plan, fleet)
    repaired = only(events, Repaired)
    assert (repaired.seeded_from, repaired.update) == (source, update)
    assert (fleet.loaded, updates_of(events)) == ([(0, 4)] if "snapshot" in source else [], list(range(1, 9)))
    assert (only(events, RunEnded).updates, len(fleet.memories)) == (8, 2 if every else 0)


@pytest.mark.parametrize(("written", "source"), [(5, "update-00000005"), (3, "the snapshot of host a")])
def test_a_checkpoint_counts_if_it_is_newer(make: Make, written: int, source: str) -> None:
    plan = plan_of(make, checkpoint_every=f"{written} updates")

    class Saves(Keeps):
        def end_call(self, report: CallReport) -> None:
            super().end_call(report)
            if (report.first_update, report.instance) == (written - 1, 0):
                self.saved = save(plan, written)

        def _report(self, instance: int, update: int) -> CallReport:
            reports = self._saves if update == written and instance == 0 else ()
            return dataclasses.replace(super()._report(instance, update), saves=reports)

    fleet = Saves(plan, {(5, 1): ALL_LOST}, repairs=[{}])
    assert only(events_of(plan, fleet), Repaired).seeded_from.endswith(source)


def test_updates_that_are_not_reported_are_repeated_and_one_instance_of_a_host_writes(make: Make) -> None:
    plan = plan_of(make)  # instance 0 has taken its snapshot of update 6, and instance 1 has not reported it
    events = events_of(plan, Keeps(plan, {(5, 1): ALL_LOST}, repairs=[{}]))
    assert only(events, Repaired).update == 4
    assert not [event for event in of(events, UpdateDone) if event.missing_reports]
    fleet = Keeps(plan)
    fleet.on_hosts = ["a", "a"]
    events_of(plan, fleet)
    assert ([each is None for each in fleet.places], list(fleet.memories)) == ([False, True], ["a"])


def test_the_snapshot_of_a_lost_host_is_on_the_others_and_new_processes_write_new_ones(make: Make) -> None:
    plan = plan_of(make)
    fleet = Keeps(plan, {(5, 0): ALL_LOST, (7, 0): ALL_LOST}, repairs=[{}, {}])
    fleet.lose = ("a",)
    repairs = [(each.seeded_from, each.update) for each in of(events_of(plan, fleet), Repaired)]
    assert repairs == [("the snapshot of host b", 4), ("the snapshot of host b", 6)]
    assert fleet.loaded == [(1, 4), (1, 6)]
    assert fleet.places[0] is not None
    fleet = Keeps(plan, {(5, 0): broken(lost(1))}, repairs=[{0: 5}])
    fleet.lose = ("b",)
    assert only(events_of(plan, fleet), Repaired).seeded_from == "instance 0"
    assert fleet.places[1] is not None
    assert not fleet.memories["b"].is_lost


def test_a_run_that_ends_leaves_the_newest_snapshot_as_a_checkpoint(make: Make) -> None:
    plan = plan_of(make, max_restarts=0)
    seen: List[Event] = []
    with pytest.raises(InstanceFailed):
        seen.extend(coordinator.run(plan, Keeps(plan, {(5, 0): ALL_LOST}), MetricsAggregator(plan, 0.0)))
    newest, damaged = newest_valid(checkpoints_folder(plan.run_dir))
    assert (newest and newest.update, damaged) == (4, [])
    assert load_checkpoint(newest.path)["weights"]["weight"].tolist() == [4.0, 4.0]  # type: ignore[union-attr]


def test_an_epoch_that_goes_back_to_a_snapshot_has_the_metrics_of_an_undisturbed_one(make: Make) -> None:
    plan = plan_of(make, updates=None)
    epoch = plan.updates_per_epoch
    undisturbed = events_of(plan, Keeps(plan))
    disturbed = events_of(plan, Keeps(plan, {(epoch - 2, 0): ALL_LOST}, repairs=[{}]))
    assert only(disturbed, Repaired).update == (epoch - 2) // EVERY * EVERY
    assert of(disturbed, EpochDone) == of(undisturbed, EpochDone)
