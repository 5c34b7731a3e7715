"""The metrics of an epoch after a resume and after repairs: those of an undisturbed run."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, List, Mapping, Tuple

import pytest

from raypod.events import CallReport, EpochDone
from raypod.plan.plan import Plan
from raypod.training.checkpoint.format import Manifest
from raypod.training.checkpoint.resume import restart_point
from tests.support.saved_runs import save
from tests.support.scripted_runs import Breaks, broken, events_of, lost, of

Make = Callable[..., Plan]
POINTS = [4, 8, 12, 16]


class Varies(Breaks):
    """Every replica has other sums in each update; `saved` has the manifests of the checkpoints."""

    def __init__(self, plan: Plan, *arguments: Any, **options: Any) -> None:
        super().__init__(plan, *arguments, **options)
        self.saved: Dict[int, Manifest] = {}
        self.weights = ""  # of the checkpoint that was loaded last

    def reports(self, update: int) -> List[CallReport]:
        found = []
        for report in super().reports(update):
            row = tuple(value / (3 + update) + report.instance for value in report.sums[0][0])
            found.append(dataclasses.replace(report, sums=((row,) * len(report.sums[0]),)))
        return found

    def call(self, method: str, *arguments: Any) -> List[Any]:
        if method == "save":
            self.saved.setdefault(arguments[0].update, arguments[0])
        results = super().call(method, *arguments)
        if method == "load_checkpoint":
            self.weights = arguments[1].manifest.weights_sha256
        return [self.weights or each for each in results] if method == "seed_weights" else results


def plan_of(make: Make) -> Plan:
    """2 epochs of 10 updates each."""
    training, pod = {"epochs": 2, "batch_size": 1}, {"replicas": 4, "num_instances": 2}
    data = {"dataset": "synthetic", "samples": 40}
    plan = make(training=training, pod=pod, data=data, run={"checkpoint_every": "4 updates"})
    assert plan.updates_per_epoch == 10
    return plan


def epochs_of(plan: Plan, fleet: Breaks, **options: Any) -> List[Tuple[int, Mapping[str, float]]]:
    return [(each.epoch, each.metrics) for each in of(events_of(plan, fleet, **options), EpochDone)]


def test_the_sums_of_a_checkpoint_are_those_of_its_epoch_until_then(make: Make) -> None:
    plan = plan_of(make)
    fleet = Varies(plan)
    epochs_of(plan, fleet)
    reports = {update: fleet.reports(update) for update in range(20)}
    for update in POINTS:
        rows = [row for each in range(update // 10 * 10, update) for one in reports[each] for row in one.sums[0]]
        for index, name in enumerate(("loss", "accuracy")):
            found = [sum(parts) for parts in fleet.saved[update].epoch_sums[name]]
            expected = [sum(row[2 * index + side] for row in rows) for side in (0, 1)]
            assert found == pytest.approx(expected)
    assert fleet.saved[20].epoch_sums == {}


@pytest.mark.parametrize("update", POINTS)
def test_an_epoch_has_the_same_metrics_after_a_resume(make: Make, update: int) -> None:
    plan = plan_of(make)
    undisturbed = Varies(plan)
    expected = epochs_of(plan, undisturbed)
    save(plan, update, epoch_sums=undisturbed.saved[update].epoch_sums)
    checkpoint, _ = restart_point(plan.run_dir, None)
    resumed = Varies(plan)
    assert epochs_of(plan, resumed, resumed=checkpoint) == expected[update // 10 :]
    for later in (each for each in POINTS if each > update):
        assert resumed.saved[later].epoch_sums == undisturbed.saved[later].epoch_sums


def test_a_checkpoint_without_sums_leaves_those_of_the_updates_after_it(make: Make) -> None:
    plan = plan_of(make)
    fleet = Varies(plan)
    (_, full), _ = epochs_of(plan, fleet)
    (_, rest), _ = epochs_of(plan, Varies(plan), resumed=save(plan, 4))
    assert rest["loss"] != full["loss"]
    rows = [row for update in range(4, 10) for one in fleet.reports(update) for row in one.sums[0]]
    assert rest["loss"] == pytest.approx(sum(row[0] for row in rows) / sum(row[1] for row in rows))


@pytest.mark.parametrize(("fails_at", "state_of"), [(6, 6), (6, 4), (13, 12), (13, 8)])
def test_a_repair_restores_the_sums_of_the_state_that_a_survivor_has(make: Make, fails_at: int, state_of: int) -> None:
    plan = plan_of(make)
    undisturbed = Varies(plan)
    expected = epochs_of(plan, undisturbed)
    fleet = Varies(plan, {(fails_at, 0): broken(lost(1))}, repairs=[{0: state_of}])
    assert epochs_of(plan, fleet) == expected
    assert {update: each.epoch_sums for update, each in fleet.saved.items()} == {
        update: each.epoch_sums for update, each in undisturbed.saved.items()
    }


def test_a_repair_from_a_checkpoint_restores_its_sums(make: Make) -> None:
    plan = plan_of(make)
    undisturbed = Varies(plan)
    expected = epochs_of(plan, undisturbed)
    save(plan, 4, epoch_sums=undisturbed.saved[4].epoch_sums)  # of an earlier process
    fleet = Varies(plan, {(7, 0): broken(lost(0), lost(1))}, repairs=[{}])
    assert epochs_of(plan, fleet) == expected
    assert fleet.saved[8].epoch_sums == undisturbed.saved[8].epoch_sums
