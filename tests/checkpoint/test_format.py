"""A checkpoint is whole or absent: written under every kind of death, read with every kind of damage."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import torch
from disk_faults import Disk, Killed

from raypod.checkpoint import format, resume, writer
from raypod.checkpoint.format import Checkpoint
from raypod.checkpoint.resume import manifest_of
from raypod.checkpoint.writer import State
from raypod.errors import ConfigError
from raypod.plan.plan import Plan

Make = Callable[..., Plan]


def state(value: float) -> State:
    optimizer = {"param_groups": [{"lr": 0.1, "params": [0]}], "momentum": torch.full((3,), value)}
    return State({"layer.weight": torch.full((2, 3), value)}, optimizer)


def save(plan: Plan, update: int, keep: int = 3, **known: Any) -> Checkpoint:
    manifest = dataclasses.replace(manifest_of(plan, update, known.pop("generation", 1)), **known)
    return writer.write_checkpoint(format.folder_of(plan.run_dir), manifest, state(float(update)), keep)


def resumed(make: Make, where: object, **sections: Any) -> resume.Found:
    run = {"resume": str(where), **sections.pop("run", {})}
    return resume.read(make(run=run, **sections))


def updates_in(plan: Plan) -> List[int]:
    return [each.update for each in format.found_in(format.folder_of(plan.run_dir))[0]]


def test_a_run_folder_gives_its_newest_checkpoint(make: Make) -> None:
    plan = make()
    save(plan, 44)
    newest = save(plan, 88)
    found = resumed(make, plan.run_dir)
    assert (found.checkpoint.path, found.checkpoint.update, found.passed_over) == (newest.path.resolve(), 88, ())
    loaded = writer.load_checkpoint(found.checkpoint.path)
    assert torch.equal(loaded["weights"]["layer.weight"], torch.full((2, 3), 88.0))
    assert loaded["optimizer"]["param_groups"] == [{"lr": 0.1, "params": [0]}]
    assert (format.folder_of(plan.run_dir) / "LATEST").read_text() == "update-00000088\n"


def test_the_manifest_says_where_it_was_taken(make: Make) -> None:
    plan = make(training={"batch_size": 16})
    save(plan, 30)
    manifest = json.loads((format.folder_of(plan.run_dir) / "update-00000030" / "manifest.json").read_text())
    assert plan.updates_per_epoch == 22
    assert (manifest["epoch"], manifest["position"]) == (1, 8 * 64)
    assert set(manifest["files"]) == {"weights.safetensors", "optimizer.safetensors"}


def damage_flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


DAMAGES: Dict[str, Callable[[Path], object]] = {
    "a flipped bit in the weights": lambda path: damage_flip(path / "weights.safetensors"),
    "a flipped bit in the optimizer": lambda path: damage_flip(path / "optimizer.safetensors"),
    "a flipped bit in the manifest": lambda path: damage_flip(path / "manifest.json"),
    "a file cut off": lambda path: (path / "weights.safetensors").write_bytes(b"half"),
    "a file that is gone": lambda path: (path / "optimizer.safetensors").unlink(),
    "a manifest that is gone": lambda path: (path / "manifest.json").unlink(),
    "a foreign pickle": lambda path: (path / "weights.safetensors").write_bytes(b"\x80\x04cos\nsystem\n."),
    "an empty folder": lambda path: (shutil.rmtree(path), path.mkdir()),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(make: Make, damage: str) -> None:
    plan = make()
    save(plan, 44)
    DAMAGES[damage](save(plan, 88).path)
    found = resumed(make, plan.run_dir)
    assert found.checkpoint.update == 44
    (told,) = found.passed_over
    assert "update-00000088" in told
    assert "is damaged" in told
    with pytest.raises(ConfigError, match="update-00000088"):
        resumed(make, format.folder_of(plan.run_dir) / "update-00000088")


def test_a_folder_with_damaged_ones_only_says_so(make: Make) -> None:
    plan = make()
    DAMAGES["a file cut off"](save(plan, 44).path)
    with pytest.raises(ConfigError, match=r"none that can be used: .*weights\.safetensors has 4 bytes and had"):
        resumed(make, plan.run_dir)


def written_at_every_death(plan: Plan, monkeypatch: pytest.MonkeyPatch, **kind: bool) -> int:
    """Save at 44, then at 88 on a disk that fails at operation 1, 2, 3, ...; the number of deaths."""
    checkpoints = format.folder_of(plan.run_dir)
    deaths = 0
    while True:
        shutil.rmtree(str(checkpoints), ignore_errors=True)
        save(plan, 22)
        save(plan, 44)
        with monkeypatch.context() as patched:
            Disk(patched, deaths + 1, **kind)
            try:
                save(plan, 88, keep=2)
                return deaths
            except (Killed, OSError):
                pass
        deaths += 1
        good, passed_over = resume.newest_good(checkpoints)
        assert good is not None, f"operation {deaths}"
        assert good.update in (44, 88), f"operation {deaths}"
        assert not passed_over, f"operation {deaths}"
        assert (checkpoints / format.LATEST).read_text().strip() in [path.name for path in checkpoints.iterdir()]
        writer.load_checkpoint(good.path)
        save(plan, 132)  # and what the dead one has left is in nobody's way
        assert not [path for path in checkpoints.iterdir() if path.suffix]


def test_a_kill_at_any_write_costs_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert written_at_every_death(make(), monkeypatch) > 20


def test_a_disk_full_at_any_write_costs_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert written_at_every_death(make(), monkeypatch, full=True) > 10


def test_a_full_disk_leaves_no_part_behind(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make()
    save(plan, 44)
    with monkeypatch.context() as patched:
        Disk(patched, 3, full=True)
        with pytest.raises(OSError, match="No space left"):
            save(plan, 88)
    names = {path.name for path in format.folder_of(plan.run_dir).iterdir()}
    assert names == {"update-00000044", "LATEST"}


def test_the_newest_and_the_best_are_kept(make: Make) -> None:
    plan = make()
    accuracies = {44: 70.0, 88: 95.0, 132: 80.0, 176: None, 220: 90.0}
    for update, accuracy in accuracies.items():
        save(plan, update, keep=2, test_accuracy=accuracy)
    assert updates_in(plan) == [220, 176, 88]


def test_a_run_that_went_back_goes_on_from_what_it_did_since(make: Make) -> None:
    plan = make()
    for update in (44, 88, 132):
        save(plan, update)
    save(plan, 88, generation=2)
    assert resumed(make, plan.run_dir).checkpoint.update == 88
    assert resumed(make, plan.run_dir).checkpoint.manifest.generation == 2


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"pod": {"replicas": 8}}, "pod.replicas is 4 and this run's is 8"),
        ({"training": {"batch_size": 16}}, "global_batch_size is 32 and this run's is 64"),
        ({"training": {"device_iterations": 2}}, "training.device_iterations is 1 and this run's is 2"),
        ({"training": {"seed": 7}}, "training.seed is 42 and this run's is 7"),
        ({"training": {"model": "resnet14"}}, "training.model is resnet8 and this run's is resnet14"),
        ({"training": {"optimizer": "adam"}}, "training.optimizer is sgd and this run's is adam"),
        ({"training": {"precision": "16.32"}}, "training.precision is 32.32 and this run's is 16.32"),
        ({"data": {"dataset": "synthetic"}}, "train_samples is 1437 and this run's is 4096"),
        ({"training": {"epochs": 20}}, "total_updates is 660 and this run's is 880; --resume-anyway total_updates"),
        ({"training": {"learning_rate": 0.2}}, "learning_rate is 0.1 and this run's is 0.2; --resume-anyway learning"),
    ],
)
def test_a_wrong_resume_names_both_values(make: Make, sections: Dict[str, Any], told: str) -> None:
    path = save(make(), 44).path
    with pytest.raises(ConfigError) as caught:
        resumed(make, path, **sections)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_safe_may_differ_when_it_is_named(make: Make) -> None:
    path = save(make(), 44).path
    named = {"resume_anyway": "learning_rate, total_updates"}
    assert resumed(make, path, run=named, training={"learning_rate": 0.2, "epochs": 20}).checkpoint.update == 44
    with pytest.raises(ConfigError, match="--resume-anyway replicas: .*it may name .*learning_rate"):
        resumed(make, path, run={"resume_anyway": "replicas"}, pod={"replicas": 8})


def test_other_data_is_refused_and_may_be_allowed(make: Make) -> None:
    plan = make()
    manifest = manifest_of(plan, 44, 1)
    checkpoint = Checkpoint(Path("update-00000044"), manifest)
    checkpoint.manifest.settings["data_fingerprint"] = "aa"
    resume.check_data(plan, checkpoint, "aa")
    with pytest.raises(ConfigError, match="data_fingerprint is aa and this run's is bb; --resume-anyway data_finger"):
        resume.check_data(plan, checkpoint, "bb")
    resume.check_data(make(run={"resume_anyway": "data_fingerprint"}), checkpoint, "bb")


@pytest.mark.parametrize("sections", [{"pod": {"num_instances": 4}}, {"data": {"num_workers": 2}}])
def test_the_placement_may_differ(make: Make, sections: Dict[str, Any]) -> None:
    path = save(make(), 44).path
    assert resumed(make, path, **sections).checkpoint.update == 44


def test_a_finished_run_says_so(make: Make) -> None:
    constant = {"lr_schedule": "constant"}
    path = save(make(training=constant), 44).path
    with pytest.raises(ConfigError, match="already at update 44 of 44"):
        resumed(make, path, training={"epochs": 1, **constant})


@pytest.mark.parametrize("where", ["{}", "{}/checkpoints/update-00000044", "{}/nowhere"])
def test_what_is_not_there_is_named(make: Make, where: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--resume"):
        resumed(make, where.format(tmp_path))


@pytest.mark.parametrize("full", [False, True])
def test_a_manifest_that_is_replaced_can_be_read_whenever_that_is_cut_off(make: Make, full: bool) -> None:
    plan = make()
    accuracies = set()
    for fails_at in range(1, 30):
        saved = save(plan, 44)
        tested = dataclasses.replace(saved.manifest, test_accuracy=97.5)
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, fails_at, full=full)
            with contextlib.suppress(Killed, OSError):
                format.replace_manifest(saved, tested)
        found = format.read_manifest(saved.path)
        format.verify(found)
        assert found.manifest in (saved.manifest, tested)
        accuracies.add(found.manifest.test_accuracy)
        if disk.count < fails_at:  # it was not cut off
            break
    assert found.manifest == tested
    assert accuracies == {None, 97.5}
    told = (saved.path / "manifest.sha256").read_text().splitlines()
    assert len(told) == 1
