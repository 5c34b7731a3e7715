"""Runs resume from their newest valid checkpoint, only with compatible settings, and bit for bit."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raypod.errors import ConfigError, InstanceFailed
from raypod.events import CheckpointSaved, Event, Resized, RunEnded, UpdateDone
from raypod.plan import ipu_options
from raypod.plan.cluster import LOCAL
from raypod.plan.plan import DatasetSize, Plan, TaskFacts, make_plan
from raypod.plan.resolve import from_values
from raypod.runs import run_folder, verify_data
from raypod.runtime.worker.environment import instance_environment
from raypod.training.checkpoint import resume, storage, writer
from raypod.training.checkpoint.format import Checkpoint, best_of
from raypod.training.checkpoint.resume import manifest_of
from raypod.training.checkpoint.storage import checkpoints_folder
from tests.support.refused import refused
from tests.support.saved_runs import flip_a_bit, run, save, weights_of

Make = Callable[..., Plan]
ANYWAY = "; --resume-anyway"
DATA = {"dataset": "synthetic", "samples": 320, "image": "1x8x8"}
UPDATES = 2


def find(make: Make, where: object, **sections: Any) -> resume.ResumePoint:
    run_section = {"resume": str(where), **sections.pop("run", {})}
    return resume.find_checkpoint(make(run=run_section, **sections))


def test_a_run_folder_resumes_from_its_newest_checkpoint_first_by_generation(make: Make) -> None:
    plan = make()
    save(plan, 44)
    newest = save(plan, 88)
    found = find(make, plan.run_dir)
    assert (found.checkpoint.path, found.checkpoint.update, found.damaged) == (newest.path.resolve(), 88, ())
    loaded = writer.load_checkpoint(found.checkpoint.path)
    assert torch.equal(loaded["weights"]["layer.weight"], torch.full((2, 3), 88.0))
    assert loaded["optimizer"]["param_groups"] == [{"lr": 0.1, "params": [0]}]
    assert (checkpoints_folder(plan.run_dir) / "LATEST").read_text() == "update-00000088\n"
    save(plan, 132)
    save(plan, 88, generation=2)  # newer than the later update
    found = find(make, plan.run_dir)
    assert (found.checkpoint.update, found.checkpoint.manifest.generation) == (88, 2)


DAMAGES: Dict[str, Callable[[Path], object]] = {
    "a flipped bit in the weights": lambda path: flip_a_bit(path / "weights.safetensors"),
    "a flipped bit in the optimizer": lambda path: flip_a_bit(path / "optimizer.safetensors"),
    "a flipped bit in the manifest": lambda path: flip_a_bit(path / "manifest.json"),
    "a truncated file": lambda path: (path / "weights.safetensors").write_bytes(b"half"),
    "a missing file": lambda path: (path / "optimizer.safetensors").unlink(),
    "a missing manifest": lambda path: (path / "manifest.json").unlink(),
    "a pickle": lambda path: (path / "weights.safetensors").write_bytes(b"\x80\x04cos\nsystem\n."),
    "an empty folder": lambda path: (shutil.rmtree(path), path.mkdir()),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(make: Make, damage: str) -> None:
    plan = make()
    save(plan, 44)
    DAMAGES[damage](save(plan, 88).path)
    found = find(make, plan.run_dir)
    assert found.checkpoint.update == 44
    (message,) = found.damaged
    assert "update-00000088" in message
    assert "is damaged" in message
    refused("update-00000088", find, make, checkpoints_folder(plan.run_dir) / "update-00000088")


def test_checkpoints_that_a_run_has_left_behind_are_neither_the_best_nor_kept_for_it(make: Make) -> None:
    plan = make()
    kept = [save(plan, update, test_accuracy=update / 100) for update in (44, 88, 132)][0]
    storage.make_newest(kept, 2)
    found, _ = storage.list_checkpoints(checkpoints_folder(plan.run_dir))
    assert [each.age for each in found] == [(2, 44), (1, 132), (1, 88)]
    assert best_of(found, plan.best_metric) == found[0]
    save(plan, 66, keep=1, generation=2, test_accuracy=0.1)
    left, _ = storage.list_checkpoints(checkpoints_folder(plan.run_dir))
    assert [each.age for each in left] == [(2, 66), (2, 44)]


def test_without_a_valid_checkpoint_there_is_an_error(make: Make, tmp_path: Path) -> None:
    plan = make()
    for where in (tmp_path, tmp_path / "checkpoints" / "update-00000044", tmp_path / "nowhere"):
        refused("--resume", find, make, where)
    DAMAGES["a truncated file"](save(plan, 44).path)
    refused(r"no valid checkpoint: .*weights\.safetensors has 4 bytes, expected", find, make, plan.run_dir)


@pytest.mark.parametrize("fault", [errno.EIO, errno.ESTALE, None])
def test_the_same_command_does_not_start_again_if_no_checkpoint_can_be_read(
    make: Make, fault: Optional[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make()
    assert resume.resume_interrupted(plan) == (plan, None)
    path = save(plan, 44).path

    def unreadable(folder: str) -> Any:
        raise OSError(fault, os.strerror(fault or 0), folder)

    if fault is None:
        DAMAGES["a flipped bit in the weights"](path)
        cause = "the SHA-256 of weights.safetensors does not match"
    else:
        monkeypatch.setattr(os, "scandir", unreadable)
        cause = os.strerror(fault)
    refused(f"no checkpoint that can be read: .*{cause}.*; continue when one of them", resume.resume_interrupted, plan)


def test_a_folder_of_runs_or_of_checkpoints_is_an_error_that_names_the_run(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for index, name in enumerate(("older", "newest", "oldest")):
        (tmp_path / "runs" / name / "checkpoints").mkdir(parents=True)
        config = tmp_path / "runs" / name / "config.yaml"
        config.write_text("{}")
        os.utime(str(config), (index % 2, index % 2))
    refused("runs is no run folder; it contains 3 runs, the newest is runs/newest$", find, make, "runs")
    refused(r"is no run folder; did you mean runs/older\?$", find, make, "runs/older/checkpoints/")
    refused("runs/older/checkpoints contains no checkpoint; repeat the command that", find, make, "runs/older")
    (tmp_path / "runs" / "older" / "checkpoints" / "LATEST").touch()
    for name in ("config.yaml", "checkpoints/LATEST"):
        refused(rf"{name}: a file is no run folder; did you mean runs/older\?$", find, make, f"runs/older/{name}")
    refused("elsewhere: there is no such run folder or checkpoint$", find, make, "runs/elsewhere")


def test_the_message_about_a_finished_training_names_all_that_is_needed_to_continue_it(make: Make) -> None:
    constant = {"lr_schedule": "constant", "epochs": 1}
    with pytest.raises(ConfigError, match="already at update 44 of 44; set a larger --epochs$"):
        find(make, save(make(training=constant), 44).path, training={**constant, "updates": 60})
    of_40 = {**constant, "updates": 40}
    refused("40 of 40; set a larger --updates$", find, make, save(make(training=of_40), 40).path, training=of_40)
    path, anyway = save(make(training={"epochs": 1}), 44).path, {"resume_anyway": "total_updates"}
    both = "set a larger --epochs, and --resume-anyway total_updates: the schedule"
    refused(both, find, make, path, training={"epochs": 1})
    assert find(make, path, run=anyway, training={"epochs": 2}).checkpoint.update == 44
    refused("set a larger --epochs$", find, make, path, run=anyway, training={"epochs": 1})


@pytest.mark.parametrize(
    ("sections", "message"),
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
        ({"training": {"lr_schedule": "constant"}}, "and this run's is constant; --resume-anyway lr_schedule"),
        ({"ipu": {"stochastic_rounding": True}}, f"is False and this run's is True{ANYWAY} stochastic_rounding"),
        (
            {"training": {"memory_format": "channels_last"}},
            f"is contiguous and this run's is channels_last{ANYWAY} mem",
        ),
    ],
)
def test_a_different_setting_is_refused_with_both_values(make: Make, sections: Dict[str, Any], message: str) -> None:
    path = save(make(training={"memory_format": "contiguous"}), 44).path
    with pytest.raises(ConfigError) as caught:
        find(make, path, **sections)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_run_in_half_continues_with_the_numerics_of_its_checkpoint(make: Make, is_recorded: bool) -> None:
    plan = make(training={"precision": "16.16"})
    manifest = manifest_of(plan, 44, 1, "", {})
    of_older_version = {key: value for key, value in manifest.settings.items() if not key.startswith("ipu.")}
    recorded = manifest if is_recorded else dataclasses.replace(manifest, settings=of_older_version)
    assert resume.difference_to(plan, recorded, []) is None
    found = ipu_options.numerics_of(resume.in_recorded_format(plan, recorded).config)
    assert found == {"stochastic_rounding": is_recorded, "partials": "half" if is_recorded else "float"}


def test_the_placement_may_differ_and_safe_settings_if_resume_anyway_names_them(make: Make, monkeypatch: Any) -> None:
    path = save(make(), 44).path
    assert find(make, path, pod={"num_instances": 4}, data={"num_workers": 2}).checkpoint.update == 44
    named = {"resume_anyway": "learning_rate, total_updates, lr_schedule, memory_format"}
    changed = {"learning_rate": 0.2, "epochs": 20, "lr_schedule": "constant", "memory_format": "channels_last"}
    assert find(make, path, run=named, training=changed).checkpoint.update == 44
    with pytest.raises(ConfigError, match="--resume-anyway replicas: .*allowed are .*learning_rate"):
        find(make, path, run={"resume_anyway": "replicas"}, pod={"replicas": 8})
    monkeypatch.setenv("EMULATED_POD_COMPILE", "1")
    refused("compiled is False and this run's is True; --resume-anyway compiled", find, make, path)
    assert find(make, path, run={"resume_anyway": "compiled"}).checkpoint.update == 44


def test_a_run_without_a_checkpoint_starts_again(make: Make) -> None:
    plan = make()
    assert resume.way_to_continue(plan.run_dir) == f"start the command again: {plan.run_dir} has no checkpoint"
    save(plan, 1)
    assert resume.way_to_continue(plan.run_dir) == f"continue with --resume {plan.run_dir}"


def test_other_data_is_refused_unless_resume_anyway_names_it(make: Make) -> None:
    plan = make()
    checkpoint = Checkpoint(Path("update-00000044"), manifest_of(plan, 44, 1, "aa", {}))
    resume.check_data(plan, checkpoint, "aa")
    with pytest.raises(ConfigError, match="data_fingerprint is aa and this run's is bb; --resume-anyway data_finger"):
        resume.check_data(plan, checkpoint, "bb")
    resume.check_data(make(run={"resume_anyway": "data_fingerprint"}), checkpoint, "bb")
    resume.check_data(plan, checkpoint, "aa-12")  # the checkpoint is of a version that hashed no contents
    with pytest.raises(ConfigError, match="data_fingerprint is aa and this run's is bb-12; --resume-anyway"):
        resume.check_data(plan, checkpoint, "bb-12")
    saved = Checkpoint(checkpoint.path, manifest_of(plan, 44, 1, "aa-12", {}))
    resume.check_data(plan, saved, "aa-12")
    changed = r"have been changed under their names \(data_fingerprint\); --resume-anyway data_fingerprint resumes with"
    refused(changed, resume.check_data, plan, saved, "aa-13")
    resume.check_data(make(run={"resume_anyway": "data_fingerprint"}), saved, "aa-13")


@pytest.mark.parametrize("sizes", [(2, 2), (1, 4), (8, 1)])
def test_another_number_of_replicas_resumes_only_an_elastic_run_with_equal_updates(make: Make, sizes: Any) -> None:
    path = save(make(), 44).path
    replicas, accumulation = sizes
    sections = {"training": {"gradient_accumulation": accumulation}}
    is_equal = replicas * accumulation == 4
    with pytest.raises(ConfigError, match=f"replicas is 4 and this run's is {replicas}{'; .*--elastic' * is_equal}"):
        find(make, path, pod={"replicas": replicas, "num_instances": 1}, **sections)
    elastic = {"replicas": replicas, "num_instances": 1, "elastic": True}
    if is_equal:
        assert find(make, path, pod=elastic, **sections).checkpoint.update == 44
    else:
        refused("pod.replicas is 4 and this run's is 8$", find, make, path, pod=elastic, **sections)


# Dropout and BatchNorm have state per replica, which must be restored too.
MODEL = """
import torch  # noqa: E402
def make(channels, classes):
    return torch.nn.Sequential(
        torch.nn.Conv2d(channels, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.3), torch.nn.Flatten(),
        torch.nn.Linear(4 * 36, classes))
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "resume_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "resume_model:make"


def stop_after(update: int) -> Callable[[Event], None]:
    def react(event: Event) -> None:
        if isinstance(event, UpdateDone) and event.update == update:
            signal.raise_signal(signal.SIGTERM)

    return react


def plan_with(make: Make, model: str, resume: Optional[object] = None, **run_keys: Any) -> Plan:
    """Return the plan of 24 updates, 10 of them in an epoch."""
    training = {"model": model, "updates": 24, "gradient_accumulation": 2, "device_iterations": 2, "batch_size": 4}
    run_section = {"fleet": "inline", "device": "emulated", "resume": resume and str(resume), **run_keys}
    return make(training=training, data=DATA, pod={"num_instances": 1}, run=run_section)


def test_a_run_stopped_anywhere_resumes_bit_for_bit(make: Make, model: str, tmp_path: Path) -> None:
    plan = plan_with(make, model)
    uninterrupted = weights_of(run(plan))
    folder = Path(plan.run_dir)
    folder.rename(tmp_path / "uninterrupted")
    stopped_at, resume = 0, None
    for stop in (2, 5, 10, 11, 19):  # within an epoch, within a call, at the end of an epoch, and right after it
        events = run(plan_with(make, model, resume), stop_after(stop))
        ended = events[-1]
        assert isinstance(ended, RunEnded)
        assert ended.interrupted
        assert stop <= ended.updates <= stop + 4
        assert [event.update for event in events if isinstance(event, UpdateDone)][0] == stopped_at + 1
        stopped_at, resume = ended.updates, folder
    assert weights_of(run(plan_with(make, model, resume))) == uninterrupted
    keys = ("update", "epoch", "loss", "accuracy", "samples")
    lines, expected = (
        [[json.loads(line)[key] for key in keys] for line in (each / "metrics.jsonl").read_text().splitlines()]
        for each in (folder, tmp_path / "uninterrupted")
    )
    assert lines == expected


FAILING = """
import pathlib
import torch
class Samples:
    def __init__(self, samples, failing): self.samples, self.failing = samples, failing
    def __len__(self): return self.samples
    def __getitem__(self, index):
        if index == 3 and self.failing.exists():
            raise OSError(f"image {index} is damaged")
        return torch.full((1, 8, 8), float(index % 7)), index % 10
def data(folder):
    return Samples(320, pathlib.Path(folder, "training")), Samples(40, pathlib.Path(folder, "evaluation")), 10
"""


@pytest.mark.parametrize("failing", ["training", "evaluation"])
def test_data_that_cannot_be_read_costs_no_update_of_the_first_epoch(
    make: Make, model: str, tmp_path: Path, failing: str
) -> None:
    (tmp_path / "failing_data.py").write_text(FAILING)
    sections: Any = {
        "data": {"dataset": "failing_data:data", "data_dir": str(tmp_path)},
        "training": {"model": model, "updates": 24, "batch_size": 8, "evaluate_every": 1},
        "pod": {"num_instances": 1},
    }
    run_section = {"fleet": "inline", "device": "emulated"}
    plan = make(**sections, run=run_section)
    uninterrupted = weights_of(run(plan))
    shutil.rmtree(plan.run_dir)
    done: List[int] = []

    def fail_after_the_first_update(event: Event) -> None:
        (tmp_path / failing).touch()
        done.extend([event.update] if isinstance(event, UpdateDone) else [])

    with pytest.raises(InstanceFailed, match="image 3 is damaged"):
        run(plan, fail_after_the_first_update)
    (tmp_path / failing).unlink()
    found = resume.newest_valid(checkpoints_folder(plan.run_dir))[0]
    assert found.update == done[-1] > 0
    assert done[-1] == 10 or failing == "training"
    assert weights_of(run(make(**sections, run={**run_section, "resume": plan.run_dir}))) == uninterrupted


def test_a_checkpoint_at_a_time_interval_resumes_bit_for_bit(make: Make, model: str) -> None:
    events = run(plan_with(make, model, checkpoint_every="0.000001 minutes", keep_checkpoints=100))
    within_epoch = [event for event in events if isinstance(event, CheckpointSaved) and event.update % 10]
    assert len(within_epoch) > 1
    again = run(plan_with(make, model, within_epoch[0].path, checkpoint_every="0.000001 minutes"))
    assert weights_of(again) == weights_of(events)


def test_runs_with_fewer_and_then_more_replicas_have_the_same_updates(make: Make, model: str, tmp_path: Path) -> None:
    def resumed(replicas: int, updates: int) -> List[Event]:
        training = {"model": model, "updates": updates, "gradient_accumulation": 8 // replicas, "batch_size": 4}
        pod = {"replicas": replicas, "num_instances": 1, "elastic": True}
        run_section = {"fleet": "inline", "device": "emulated", "resume": str(folder) if folder.exists() else None}
        plan = make(training={**training, "lr_schedule": "constant"}, data=DATA, pod=pod, run=run_section)
        run_folder.create(plan)
        return run(plan)

    folder = tmp_path / "run"
    events = [resumed(*each) for each in ((4, 3), (2, 6), (1, 9), (8, 12))]
    changes = [event for each in events for event in each if isinstance(event, Resized)]
    assert [(each.update, each.replicas, each.replicas_before) for each in changes] == [(3, 2, 4), (6, 1, 2), (9, 8, 1)]
    (ended,) = (event for event in events[-1] if isinstance(event, RunEnded))
    found = [(each["update"], each["replicas"], each["gradient_accumulation"]) for each in ended.resizes]
    assert found == [(3, 2, 4), (6, 1, 8), (9, 8, 1)]
    verdict = verify_data.verify(folder)
    assert verdict.is_proved, verdict.lines
    assert "generation 4 began after update 9: 0 superseded; 8 replicas x accumulation 1" in verdict.lines
    newest = resume.newest_valid(checkpoints_folder(str(folder)))[0]
    replicas = writer.load_checkpoint(newest.path)["replicas"]
    assert {len(values) for values in replicas["buffers"].values()} == {8}


def test_a_setting_that_differs_takes_effect(make: Make, tmp_path: Path) -> None:
    def weights(resume: Optional[Path], updates: int, **changed: Any) -> str:
        training = {"model": "tiny", "updates": updates, "warmup_updates": 1, "lr_schedule": "constant", **changed}
        anyway = {"resume": resume and str(resume), "resume_anyway": ",".join(changed) or None}
        run_section = {"fleet": "inline", "device": "emulated", **anyway}
        return weights_of(run(make(training=training, data=DATA, pod={"num_instances": 1}, run=run_section)))

    weights(None, 3)
    saved = (tmp_path / "run" / "checkpoints").rename(tmp_path / "saved") / "update-00000003"
    changes: List[Dict[str, Any]] = [
        *({"learning_rate": 0.2}, {"warmup_updates": 9}, {"lr_schedule": "step", "lr_steps": [1], "lr_gamma": 0.5}),
        *({"lr_schedule": "exponential"}, {"lr_schedule": "exponential", "lr_frequency": 2}, {"momentum": 0.5}),
        *({"label_smoothing": 0.1}, {"weight_decay": 0.05}, {}),
        {"loss_scaling": 3.0},  # not a power of two, so it changes the rounding
    ]
    updates = 14  # into the second epoch, where the steps begin
    assert len({weights(saved, updates, **change) for change in changes}) == len(changes)


def test_a_second_signal_ends_the_run_at_once(make: Make) -> None:
    plan = make(training={"model": "tiny"}, pod={"num_instances": 1}, run={"fleet": "inline"})
    seen: List[int] = []

    def react(event: Event) -> None:
        if isinstance(event, UpdateDone):
            seen.append(event.update)
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.5)  # a signal that follows at once is a copy of the first
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        run(plan, react)
    assert seen == [1]


@given(
    per_epoch=st.integers(1, 50),
    epochs=st.integers(1, 5),
    every=st.sampled_from(["1 epoch", "2 epochs", "10 minutes"]) | st.integers(1, 60).map(lambda n: f"{n} updates"),
    start=st.integers(0, 250),
    iterations=st.integers(1, 4),
)
@settings(max_examples=100, deadline=None)
def test_segments_from_any_update_cover_the_rest_of_the_run_once(
    per_epoch: int, epochs: int, every: str, start: int, iterations: int
) -> None:
    count, _, unit = every.partition(" ")
    every = f"{int(count) * iterations} {unit}" if unit == "updates" else every
    training = {"epochs": epochs, "batch_size": 1, "device_iterations": iterations}
    values = {"training": training, "pod": {"replicas": 1, "num_instances": 1}, "run": {"checkpoint_every": every}}
    plan = make_plan(from_values(values), LOCAL, TaskFacts(DatasetSize(per_epoch * iterations, 0)), "run")
    update = min(start * iterations, plan.total_updates)
    for segment in plan.segments(update):
        assert segment.first_update == update
        assert segment.num_updates > 0
        assert (segment.num_updates % iterations, segment.epoch) == (0, update // plan.updates_per_epoch)
        assert (segment.end - 1) // plan.updates_per_epoch == segment.epoch
        assert segment.ends_epoch == (segment.end % plan.updates_per_epoch == 0)
        if plan.save_every_updates:
            due = update // plan.save_every_updates * plan.save_every_updates + plan.save_every_updates
            assert segment.end <= due
        update = segment.end
    assert update == plan.total_updates


def test_an_interval_that_is_invalid_or_ends_within_a_call_is_refused(make: Make) -> None:
    for every in ("0 updates", "1.5 epochs", "-1 updates", "often", "10", "0 minutes", "3 parsecs"):
        refused("run.checkpoint_every", from_values, {"run": {"checkpoint_every": every}})
    with pytest.raises(ConfigError, match="--checkpoint-every 10 is not a whole number of calls of 4 .* use 8 or 12"):
        make(training={"device_iterations": 4}, run={"checkpoint_every": "10 updates"})
    with pytest.raises(ConfigError, match="--snapshot-every 3 is not a whole number of calls of 4 .* use 4"):
        make(training={"device_iterations": 4}, run={"snapshot_every": 3})


FORMAT_MODEL = """
import torch
def make(channels, classes):
    return torch.nn.Sequential(
        torch.nn.Conv2d(channels, 256, 3, 2), torch.nn.ReLU(), torch.nn.Conv2d(256, 512, 3, 2),  # the second: a product
        torch.nn.Flatten(), torch.nn.Linear(512, classes))
"""


@pytest.mark.parametrize(
    ("requested", "of_checkpoint", "used"),
    [
        ("auto", {resume.MEMORY_FORMAT: "contiguous"}, "contiguous"),
        ("auto", {resume.MEMORY_FORMAT: "channels_last"}, "channels_last"),
        ("auto", {}, "contiguous"),  # a checkpoint of a version without formats
        ("channels_last", {resume.MEMORY_FORMAT: "contiguous"}, "channels_last"),
    ],
)
def test_a_run_that_leaves_the_choice_continues_in_the_format_of_the_checkpoint(
    make: Make, requested: str, of_checkpoint: Dict[str, Any], used: str, monkeypatch: Any
) -> None:
    plan = make(training={"memory_format": requested})
    manifest = resume.manifest_of(plan, 3, 1, "", {})
    others = {key: value for key, value in manifest.settings.items() if key != resume.MEMORY_FORMAT}
    recorded = dataclasses.replace(manifest, settings={**others, **of_checkpoint})
    continued = resume.in_recorded_format(plan, recorded)
    found = [instance_environment(continued, spec) for spec in plan.placement.instances]
    assert [each["EMULATED_POD_MEMORY_FORMAT"] for each in found] == [used] * 2
    for value, expected in (("1", "1"), ("0", "0"), ("", "0")):  # instances compile as the command requests
        monkeypatch.setenv("EMULATED_POD_COMPILE", value)
        assert instance_environment(plan, plan.placement.instances[0])["EMULATED_POD_COMPILE"] == expected


@pytest.mark.parametrize("name", ["auto", "contiguous"])
def test_a_resumed_run_has_the_bits_of_one_without_interruption(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "format_model.py").write_text(FORMAT_MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))

    def plan_of(folder: str, updates: int, **sections: Any) -> Plan:
        training = {"model": "format_model:make", "updates": updates, "lr_schedule": "constant", "batch_size": 2}
        run_section = {"fleet": "inline", "device": "emulated", **sections.pop("run", {})}
        training = {**training, **sections.pop("training", {})}
        plan = make(training=training, pod={"num_instances": 1}, run=run_section)
        return dataclasses.replace(plan, run_dir=str(tmp_path / folder))

    chosen = {"training": {"memory_format": name}}
    whole = weights_of(run(plan_of("whole", UPDATES, **chosen)))
    first = plan_of("parts", UPDATES // 2, **chosen)
    run(first)
    (checkpoint,), _ = storage.list_checkpoints(storage.checkpoints_folder(first.run_dir))
    manifest = checkpoint.manifest
    assert manifest.settings[resume.MEMORY_FORMAT] == ("channels_last" if name == "auto" else "contiguous")
    second = plan_of("parts", UPDATES, run={"resume": first.run_dir})
    assert weights_of(run(resume.in_recorded_format(second, manifest))) == whole
    other = {"training": {"memory_format": "contiguous" if name == "auto" else "channels_last"}}
    assert weights_of(run(plan_of("other", UPDATES, **other))) != whole, "both formats compute the same bits here"
