"""A checkpoint is complete or absent, whatever fails while it is written; the training continues meanwhile."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Callable

import pytest
import torch
from faulty_disks import FaultyDisk, FullDisk, Killed
from saved_runs import run, save, weights_of

from raypod import train
from raypod.checkpoint import resume, writer
from raypod.checkpoint.storage import checkpoints_folder
from raypod.errors import CheckpointNotSaved, LeaseLost
from raypod.events import CheckpointBegun, CheckpointFailed, CheckpointSaved, Event, RunEnded, UpdateDone
from raypod.model import networks
from raypod.plan.plan import Plan
from raypod.record import verify_data

Make = Callable[..., Plan]


def fail_at_every_operation(plan: Plan, monkeypatch: pytest.MonkeyPatch, full: bool) -> int:
    """Save at update 88 on a disk that fails at operation 1, 2, 3, ...; return the number of operations."""
    checkpoints = checkpoints_folder(plan.run_dir)
    failures = 0
    while True:
        shutil.rmtree(str(checkpoints), ignore_errors=True)
        save(plan, 22)
        save(plan, 44)
        with monkeypatch.context() as patched:
            FaultyDisk(patched, failures + 1, full=full)
            try:
                save(plan, 88, keep=2)
                return failures
            except (Killed, OSError):
                pass
        failures += 1
        valid, damaged = resume.newest_valid(checkpoints)
        assert valid is not None, f"operation {failures}"
        assert valid.update in (44, 88), f"operation {failures}"
        assert not damaged, f"operation {failures}"
        assert (checkpoints / "LATEST").read_text().strip() in [path.name for path in checkpoints.iterdir()]
        writer.load_checkpoint(valid.path)
        save(plan, 132)
        assert not [path for path in checkpoints.iterdir() if path.suffix], "leftovers remain"


@pytest.mark.parametrize(("full", "operations"), [(False, 20), (True, 10)], ids=["killed", "disk full"])
def test_a_failure_at_any_operation_loses_no_checkpoint(
    make: Make, monkeypatch: pytest.MonkeyPatch, full: bool, operations: int
) -> None:
    assert fail_at_every_operation(make(), monkeypatch, full) > operations


def test_a_full_disk_leaves_no_partial_files(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make()
    save(plan, 44)
    with monkeypatch.context() as patched:
        FaultyDisk(patched, 3, full=True)
        with pytest.raises(OSError, match="No space left"):
            save(plan, 88)
    names = {path.name for path in checkpoints_folder(plan.run_dir).iterdir()}
    assert names == {"update-00000044", "LATEST"}


def test_a_full_disk_is_a_warning_while_an_older_checkpoint_exists(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch)
    training = {"model": "tiny", "updates": 40}
    plan = make(training=training, pod={"num_instances": 1}, run={"fleet": "inline", "checkpoint_every": "8 updates"})

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
    training = {"model": "tiny", "updates": 60}

    def plan_named(name: str) -> Plan:
        keys = {"fleet": "inline", "checkpoint_every": "20 updates", "run_dir": name}
        plan = make(training=training, pod={"num_instances": 1}, run=keys)
        return dataclasses.replace(plan, run_dir=str(Path(plan.run_dir).with_name(name)))

    uninterrupted = weights_of(run(plan_named("fast")))
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (time.sleep(0.1), real(descriptor)))
    events = run(plan_named("slow"))
    assert weights_of(events) == uninterrupted
    begun = next(at for at, event in enumerate(events) if isinstance(event, CheckpointBegun))
    saved = next(at for at, event in enumerate(events) if isinstance(event, CheckpointSaved))
    assert any(isinstance(event, UpdateDone) for event in events[begun:saved])


@pytest.mark.parametrize(("is_first", "way_out"), [(True, "there is no earlier checkpoint"), (False, ".*/update-0")])
def test_a_disk_that_stays_full_ends_the_run_and_keeps_older_checkpoints(
    make: Make, monkeypatch: pytest.MonkeyPatch, is_first: bool, way_out: str
) -> None:
    disk = FullDisk(monkeypatch)
    training = {"model": "tiny", "updates": 120}
    plan = make(training=training, pod={"num_instances": 1}, run={"fleet": "inline", "checkpoint_every": "8 updates"})

    def react(event: Event) -> None:
        if isinstance(event, UpdateDone if is_first else CheckpointSaved):
            disk.free_bytes = 0

    with pytest.raises(CheckpointNotSaved, match=f"{os.strerror(errno.ENOSPC)}.*{way_out}"):
        run(plan, react)
    valid = resume.newest_valid(Path(plan.run_dir) / "checkpoints")[0]
    assert valid is None if is_first else valid is not None and 8 <= valid.update < 120


def test_the_weights_load_in_plain_torch(make: Make) -> None:
    package = pytest.importorskip("safetensors.torch", reason="the safetensors package is not installed")
    plan = make(training={"updates": 2}, pod={"num_instances": 1}, run={"fleet": "inline"})
    run(plan)
    latest = Path(plan.run_dir, "checkpoints", Path(plan.run_dir, "checkpoints", "LATEST").read_text().strip())
    network = networks.build_model(plan.config, 1, 8, 10)
    network.load_state_dict(package.load_file(str(latest / "weights.safetensors")))
    assert all(bool(torch.isfinite(value).all()) for value in network.state_dict().values())


def test_a_mounted_disk_that_is_full_loses_no_checkpoint(
    small_disk: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = small_disk(tmp_path / "disk", kib=1536)  # space for two checkpoints of the small model
    flags = ["--fleet", "inline", "--device", "emulated", "--updates", "8", "--checkpoint-every", "2 updates"]
    command = [*flags, "--run-dir", str(disk / "run")]
    assert train.main(command) == 1
    printed = capsys.readouterr()
    assert "warning: cannot write the checkpoint" in printed.out
    (line,) = printed.err.strip().splitlines()
    assert os.strerror(errno.ENOSPC) in line
    valid, damaged = resume.newest_valid(disk / "run" / "checkpoints")
    assert valid is not None
    assert not damaged
    subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True, timeout=10)
    assert train.main(command) == 0  # the same command resumes
    assert f"from update {valid.update} on" in capsys.readouterr().out
    assert train.main([*flags, "--run-dir", str(tmp_path / "uninterrupted")]) == 0
    folders = (disk / "run", tmp_path / "uninterrupted")
    hashes = {json.loads((folder / "summary.json").read_text())["weights_sha256"] for folder in folders}
    assert len(hashes) == 1
    assert verify_data.verify(disk / "run").is_proved


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
