"""Manifests are read and replaced safely; the newest and the best checkpoints are kept."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Callable

import pytest
from faulty_disks import FaultyDisk, Killed
from saved_runs import save

from raypod.checkpoint.storage import checkpoints_folder, list_checkpoints, read_manifest, replace_manifest, verify
from raypod.plan.plan import Plan

Make = Callable[..., Plan]


def test_the_manifest_records_the_position_in_the_data(make: Make) -> None:
    plan = make(training={"batch_size": 16})
    path = save(plan, 30).path
    manifest = json.loads((path / "manifest.json").read_text())
    assert path == checkpoints_folder(plan.run_dir) / "update-00000030"
    assert plan.updates_per_epoch == 22
    assert (manifest["epoch"], manifest["position"]) == (1, 8 * 64)
    assert set(manifest["files"]) == {"weights.safetensors", "optimizer.safetensors"}


def test_the_newest_and_the_most_accurate_are_kept(make: Make) -> None:
    plan = make()
    accuracies = {44: 70.0, 88: 95.0, 132: 80.0, 176: None, 220: 90.0}
    for update, accuracy in accuracies.items():
        save(plan, update, keep=2, test_accuracy=accuracy)
    readable, damaged = list_checkpoints(checkpoints_folder(plan.run_dir))
    assert [each.update for each in readable] == [220, 176, 88]
    assert not damaged


@pytest.mark.parametrize("full", [False, True])
def test_a_manifest_stays_readable_wherever_its_replacement_is_interrupted(make: Make, full: bool) -> None:
    plan = make()
    accuracies = set()
    for fails_at in range(1, 30):
        saved = save(plan, 44)
        tested = dataclasses.replace(saved.manifest, tested={"accuracy": 97.5})
        with pytest.MonkeyPatch.context() as patch:
            disk = FaultyDisk(patch, fails_at, full=full)
            with contextlib.suppress(Killed, OSError):
                replace_manifest(saved, tested)
        found = read_manifest(saved.path)
        verify(found)
        assert found.manifest in (saved.manifest, tested)
        accuracies.add(found.manifest.tested.get("accuracy"))
        if disk.count < fails_at:  # not interrupted
            break
    assert found.manifest == tested
    assert accuracies == {None, 97.5}
    assert len((saved.path / "manifest.sha256").read_text().splitlines()) == 1
