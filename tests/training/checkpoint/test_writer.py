"""A checkpoint is complete or absent, whatever fails while it is written; the training continues meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any, Callable, List

import pytest
import torch

from raypod.errors import CheckpointNotSaved, LeaseLost
from raypod.events import CheckpointBegun, CheckpointFailed, CheckpointSaved, Event, RunEnded, UpdateDone
from raypod.plan.plan import Plan
from raypod.runs import verify_data
from raypod.system import files
from raypod.training.checkpoint import resume, storage, writer
from raypod.training.checkpoint.storage import checkpoints_folder
from tests.support.faulty_disks import FaultyDisk, FullDisk, Killed
from tests.support.saved_runs import run, save, weights_of

Make = Callable[..., Plan]


@pytest.mark.parametrize(("full", "operations"), [(False, 20), (True, 10)], ids=["killed", "disk full"])
def test_a_failure_at_any_operation_loses_no_checkpoint(
    make: Make, monkeypatch: pytest.MonkeyPatch, full: bool, operations: int
) -> None:
    plan = make()
    checkpoints = checkpoints_folder(plan.run_dir)
    for fails_at in range(1, 1000):
        shutil.rmtree(str(checkpoints), ignore_errors=True)
        save(plan, 22)
        save(plan, 44)
        with monkeypatch.context() as patched:
            FaultyDisk(patched, fails_at, full=full)
            try:
                save(plan, 88, keep=2)
                break
            except Killed:
                pass
            except OSError:
                assert not [path for path in checkpoints.iterdir() if path.suffix], "a full disk leaves partial files"
        valid, damaged = resume.newest_valid(checkpoints)
        assert valid is not None, f"operation {fails_at}"
        assert valid.update in (44, 88), f"operation {fails_at}"
        assert not damaged, f"operation {fails_at}"
        assert (checkpoints / "LATEST").read_text().strip() in [path.name for path in checkpoints.iterdir()]
        writer.load_checkpoint(valid.path)
        save(plan, 132)
        assert not [path for path in checkpoints.iterdir() if path.suffix], "leftovers remain"
    assert fails_at > operations + 1


def test_latest_names_the_checkpoint_from_which_a_run_continues_that_was_killed_before_it_was_written(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make()
    save(plan, 44)

    def killed(source: Path, target: Path) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(files, "rename_file", killed)
        with pytest.raises(Killed):
            save(plan, 88)
    newest, _ = resume.newest_valid(checkpoints_folder(plan.run_dir))
    assert newest is not None
    assert (newest.update, storage.latest_name(Path(plan.run_dir))) == (88, "update-00000044")
    storage.make_newest(newest, 2)
    assert storage.latest_name(Path(plan.run_dir)) == "update-00000088"
    assert storage.read_manifest(newest.path).manifest.generation == 1


def test_a_checkpoint_that_is_reported_as_not_saved_because_latest_does_not_fit_is_absent(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, real = make(), os.open

    def full(path: str, *arguments: Any, **options: Any) -> int:
        if str(path).endswith("LATEST.partial"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", full)
        with pytest.raises(OSError, match="No space left"):
            save(plan, 44)
    assert not list(checkpoints_folder(plan.run_dir).iterdir())


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
                storage.replace_manifest(saved, tested)
        found = storage.read_manifest(saved.path)
        storage.verify(found)
        assert found.manifest in (saved.manifest, tested)
        accuracies.add(found.manifest.tested.get("accuracy"))
        if disk.count < fails_at:  # not interrupted
            break
    assert found.manifest == tested
    assert accuracies == {None, 97.5}
    assert len((saved.path / "manifest.sha256").read_text().splitlines()) == 1


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
    for update, accuracy in {44: 70.0, 88: 95.0, 132: 80.0, 176: None, 220: 90.0}.items():
        save(plan, update, keep=2, test_accuracy=accuracy)
    readable, damaged = storage.list_checkpoints(checkpoints_folder(plan.run_dir))
    assert [each.update for each in readable] == [220, 176, 88]
    assert not damaged


def plan_of(make: Make, updates: int, every: int) -> Plan:
    run_section = {"fleet": "inline", "checkpoint_every": f"{every} updates", "save_retry_s": 0}
    return make(training={"model": "tiny", "updates": updates}, pod={"num_instances": 1}, run=run_section)


def test_a_full_disk_is_a_warning_while_an_older_checkpoint_exists(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch)
    plan = plan_of(make, 40, every=8)

    def react(event: Event) -> None:
        if isinstance(event, CheckpointSaved) and event.update == 8:
            disk.free_bytes = 1000
        elif isinstance(event, CheckpointFailed):
            disk.free_bytes = None

    events = run(plan, react)
    failed = [event for event in events if isinstance(event, CheckpointFailed)]
    assert failed
    assert failed[0].cause == os.strerror(errno.ENOSPC)
    saved = [event for event in events[: events.index(failed[0])] if isinstance(event, CheckpointSaved)]
    assert failed[0].previous == saved[-1].path
    assert isinstance(events[-1], RunEnded)
    assert events[-1].updates == 40
    lines = (Path(plan.run_dir) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines] == list(range(1, 41))  # delayed lines are written later
    order = verify_data.Order(plan.geometry, plan.config.training.seed, plan.dataset_size.train_samples)
    lines_and_errors = verify_data.ledger.read(Path(plan.run_dir) / "ledger.jsonl")
    assert verify_data.check_ledger(order, *lines_and_errors).is_proved


def test_a_slow_disk_does_not_stop_the_training(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, has_gone_on = plan_of(make, 24, every=8), threading.Event()
    uninterrupted = weights_of(run(plan))
    shutil.rmtree(plan.run_dir)
    begun: List[int] = []
    waited: List[bool] = []

    def slow(descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            waited.append(has_gone_on.wait(60))

    def react(event: Event) -> None:
        if isinstance(event, CheckpointBegun):
            begun.append(event.update)
        elif isinstance(event, UpdateDone) and begun:
            has_gone_on.set()

    monkeypatch.setattr(os, "fsync", slow)
    assert weights_of(run(plan, react)) == uninterrupted
    assert begun[0] == 8
    assert set(waited) == {True}


@pytest.mark.parametrize(("is_first", "hint"), [(True, "there is no earlier checkpoint"), (False, ".*/update-0")])
def test_a_disk_that_stays_full_ends_the_run_and_keeps_older_checkpoints(
    make: Make, monkeypatch: pytest.MonkeyPatch, is_first: bool, hint: str
) -> None:
    disk = FullDisk(monkeypatch)
    plan = plan_of(make, 120, every=8)

    def react(event: Event) -> None:
        if isinstance(event, UpdateDone if is_first else CheckpointSaved):
            disk.free_bytes = 0

    with pytest.raises(CheckpointNotSaved, match=f"{os.strerror(errno.ENOSPC)}.*{hint}"):
        run(plan, react)
    valid = resume.newest_valid(Path(plan.run_dir) / "checkpoints")[0]
    assert valid is None if is_first else valid is not None and 8 <= valid.update < 120


def test_a_write_that_is_interrupted_before_its_thread_has_started_can_be_closed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LeaseLost is raised by a signal handler, anywhere in the main thread."""
    plan = make()
    background = writer.BackgroundWriter(plan)

    def start(thread: threading.Thread) -> None:
        raise LeaseLost("run", "pid 7")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(LeaseLost):
        background.begin(resume.manifest_of(plan, 1, 1, "", {}), writer.State({"weight": torch.ones(2)}, {}))
    background.close()
    assert background.finish() == ()


def test_a_run_folder_that_is_gone_is_not_created_again(tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    with storage.unique_file(checkpoints) as path:
        assert path is None
    with pytest.raises(FileNotFoundError), storage.new_checkpoint(checkpoints, 4):
        pytest.fail("the folder of an unmounted disk was created")
    assert not list(tmp_path.iterdir())
