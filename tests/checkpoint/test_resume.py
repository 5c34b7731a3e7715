"""Runs that are stopped, run out of disk, or go on: the bits of an undisturbed run, and nothing lost on the way."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raypod import train
from raypod.checkpoint import resume
from raypod.coordinator import coordinator
from raypod.errors import CheckpointNotSaved, ConfigError
from raypod.events import CheckpointBegun, CheckpointFailed, CheckpointSaved, Event, RunEnded, UpdateDone
from raypod.fleet.inline import InlineFleet
from raypod.model import networks
from raypod.plan.cluster import LOCAL
from raypod.plan.plan import DatasetSize, Plan, make_plan
from raypod.plan.resolve import from_values
from raypod.record import verify_data
from raypod.record.metrics import MetricsFold
from raypod.record.sinks import Sinks

Make = Callable[..., Plan]

# Dropout and BatchNorm: what each replica draws and counts by itself has to be put back, too.
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


def run(plan: Plan, react: Callable[[Event], object] = lambda event: None) -> List[Event]:
    """Carry out a plan as the command does, files of the run folder included."""
    Path(plan.run_dir).mkdir(parents=True, exist_ok=True)
    resumed = resume.read(plan).checkpoint if plan.config.run.resume else None
    events = []
    with Sinks(plan) as sinks:
        for event in coordinator.run(plan, InlineFleet(plan), MetricsFold(plan, 0.0), resumed):
            sinks.take(event)
            events.append(event)
            react(event)
    return events


def sha256(events: List[Event]) -> str:
    (ended,) = (event for event in events if isinstance(event, RunEnded))
    return ended.weights_sha256


def stop_after(update: int) -> Callable[[Event], None]:
    def react(event: Event) -> None:
        if isinstance(event, UpdateDone) and event.update == update:
            signal.raise_signal(signal.SIGTERM)

    return react


def plan_with(make: Make, model: str, resume: Optional[str] = None, **run_keys: Any) -> Plan:
    training = {"model": model, "updates": 100, "gradient_accumulation": 2, "device_iterations": 2, "batch_size": 4}
    run_section = {"fleet": "inline", "device": "emulated", "resume": resume, **run_keys}
    return make(training=training, pod={"num_instances": 1}, run=run_section)


def test_a_run_stopped_anywhere_goes_on_bit_for_bit(
    make: Make, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_with(make, model)
    undisturbed = sha256(run(plan))
    folder = Path(plan.run_dir)
    folder.rename(tmp_path / "undisturbed")
    stopped_at, resume = 0, None
    for stop in (2, 5, 44, 45, 90):  # in mid-epoch, inside a call, at the end of an epoch, and right after it
        events = run(plan_with(make, model, resume), stop_after(stop))
        ended = events[-1]
        assert isinstance(ended, RunEnded)
        assert ended.interrupted
        assert stop <= ended.updates <= stop + 4
        assert [event.update for event in events if isinstance(event, UpdateDone)][0] == stopped_at + 1
        stopped_at, resume = ended.updates, str(folder)
    assert sha256(run(plan_with(make, model, resume))) == undisturbed
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    whole = [json.loads(line) for line in (tmp_path / "undisturbed" / "metrics.jsonl").read_text().splitlines()]
    keys = ("update", "epoch", "loss", "accuracy", "samples")
    assert [[line[key] for key in keys] for line in lines] == [[line[key] for key in keys] for line in whole]


def test_what_may_differ_takes_effect(make: Make, tmp_path: Path) -> None:
    def weights(resume: Optional[Path], updates: int, **changed: Any) -> str:
        training = {"model": "tiny", "updates": updates, "warmup_updates": 1, "lr_schedule": "constant", **changed}
        anyway = {"resume": resume and str(resume), "resume_anyway": ",".join(changed)}
        plan = make(
            training=training, pod={"num_instances": 1}, run={"fleet": "inline", "device": "emulated", **anyway}
        )
        return sha256(run(plan))

    weights(None, 3)
    saved = (tmp_path / "run" / "checkpoints").rename(tmp_path / "saved") / "update-00000003"
    changes: List[Dict[str, Any]] = [
        {"learning_rate": 0.2},
        {"warmup_updates": 9},
        {"lr_schedule": "step", "lr_steps": [1], "lr_gamma": 0.5},
        {"label_smoothing": 0.1},
        {"momentum": 0.5},
        {"weight_decay": 0.05},
        {"loss_scaling": 3.0},  # no power of two: it rounds
        {},
    ]
    updates = 50  # into the second epoch, where the steps begin
    assert len({weights(saved, updates, **change) for change in changes}) == len(changes)


def test_a_checkpoint_by_the_clock_is_one_to_go_on_from(make: Make, model: str) -> None:
    events = run(plan_with(make, model, checkpoint_every="0.001 minutes", keep_checkpoints=100))
    saved = [event for event in events if isinstance(event, CheckpointSaved)]
    in_mid_epoch = [event for event in saved if event.update % 44]
    assert len(in_mid_epoch) > 1
    again = run(plan_with(make, model, in_mid_epoch[0].path, checkpoint_every="0.001 minutes"))
    assert sha256(again) == sha256(events)


@given(
    per_epoch=st.integers(1, 50),
    epochs=st.integers(1, 5),
    every=st.sampled_from(["1 epoch", "2 epochs", "10 minutes"]) | st.integers(1, 60).map(lambda n: f"{n} updates"),
    start=st.integers(0, 250),
    iterations=st.integers(1, 4),
)
@settings(max_examples=100, deadline=None)
def test_legs_from_anywhere_cover_the_rest_of_the_run_once(
    per_epoch: int, epochs: int, every: str, start: int, iterations: int
) -> None:
    count, _, unit = every.partition(" ")
    every = f"{int(count) * iterations} {unit}" if unit == "updates" else every
    training = {"epochs": epochs, "batch_size": 1, "device_iterations": iterations}
    values = {"training": training, "pod": {"replicas": 1, "num_instances": 1}, "run": {"checkpoint_every": every}}
    plan = make_plan(from_values(values), LOCAL, DatasetSize(per_epoch * iterations, 0), "run")
    update = min(start * iterations, plan.total_updates)
    for leg in plan.legs(update):
        assert leg.first_update == update
        assert leg.num_updates > 0
        assert leg.num_updates % iterations == 0
        assert leg.epoch == update // plan.updates_per_epoch
        assert (leg.end - 1) // plan.updates_per_epoch == leg.epoch
        assert leg.ends_epoch == (leg.end % plan.updates_per_epoch == 0)
        if plan.save_every_updates:
            due = update // plan.save_every_updates * plan.save_every_updates + plan.save_every_updates
            assert leg.end <= due
        update = leg.end
    assert update == plan.total_updates


@pytest.mark.parametrize("every", ["0 updates", "1.5 epochs", "-1 updates", "often", "10", "0 minutes", "3 parsecs"])
def test_an_interval_that_is_none_is_told(every: str) -> None:
    with pytest.raises(ConfigError, match="run.checkpoint_every"):
        from_values({"run": {"checkpoint_every": every}})


def test_a_checkpoint_cannot_be_due_inside_a_call(make: Make) -> None:
    with pytest.raises(ConfigError, match="--checkpoint-every 10 is not a whole number of calls of 4 .* use 8 or 12"):
        make(training={"device_iterations": 4}, run={"checkpoint_every": "10 updates"})


class FullDisk:
    """`os.write` has room for so many bytes more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: Optional[int] = None
        self._real = os.write
        monkeypatch.setattr(os, "write", self._write)

    def _write(self, descriptor: int, data: Any) -> int:
        if self.room is None:
            return self._real(descriptor, data)
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._real(descriptor, bytes(data)[: self.room])
        self.room -= written
        return written


def test_a_full_disk_is_a_warning_as_long_as_a_checkpoint_is_there(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch)
    training = {"model": "tiny", "updates": 40}
    plan = make(training=training, pod={"num_instances": 1}, run={"fleet": "inline", "checkpoint_every": "8 updates"})

    def react(event: Event) -> None:
        if isinstance(event, CheckpointSaved) and event.update == 8:
            disk.room = 1000
        elif isinstance(event, CheckpointFailed):
            disk.room = None  # somebody made room

    events = run(plan, react)
    failed = [event for event in events if isinstance(event, CheckpointFailed)]
    assert failed
    assert failed[0].cause == os.strerror(errno.ENOSPC)
    assert failed[0].previous.endswith("update-00000008")
    assert isinstance(events[-1], RunEnded)
    assert events[-1].updates == 40
    lines = (Path(plan.run_dir) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines] == list(range(1, 41))  # those that had to wait came, too
    (Path(plan.run_dir) / "config.yaml").write_text(plan.config.to_yaml())
    order = verify_data.Order(plan.geometry, plan.config.training.seed, plan.size.train_samples)
    assert verify_data.judge(order, *verify_data.ledger.read(Path(plan.run_dir) / "ledger.jsonl")).is_proved


def test_a_slow_disk_does_not_stop_the_training(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    training = {"model": "tiny", "updates": 60}

    def plan_named(name: str) -> Plan:
        keys = {"fleet": "inline", "checkpoint_every": "20 updates", "run_dir": name}
        plan = make(training=training, pod={"num_instances": 1}, run=keys)
        return dataclasses.replace(plan, run_dir=str(Path(plan.run_dir).with_name(name)))

    undisturbed = sha256(run(plan_named("quick")))
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (time.sleep(0.1), real(descriptor)))
    events = run(plan_named("slow"))
    assert sha256(events) == undisturbed
    begun = next(at for at, event in enumerate(events) if isinstance(event, CheckpointBegun))
    saved = next(at for at, event in enumerate(events) if isinstance(event, CheckpointSaved))
    assert any(isinstance(event, UpdateDone) for event in events[begun:saved])


@pytest.mark.parametrize(("is_first", "told"), [(True, "there is no other"), (False, "go on from .*/update-0")])
def test_a_disk_that_stays_full_ends_the_run_and_keeps_what_is_there(
    make: Make, monkeypatch: pytest.MonkeyPatch, is_first: bool, told: str
) -> None:
    disk = FullDisk(monkeypatch)
    training = {"model": "tiny", "updates": 120}
    plan = make(training=training, pod={"num_instances": 1}, run={"fleet": "inline", "checkpoint_every": "8 updates"})

    def react(event: Event) -> None:
        if isinstance(event, UpdateDone if is_first else CheckpointSaved):
            disk.room = 0

    with pytest.raises(CheckpointNotSaved, match=f"{os.strerror(errno.ENOSPC)}.*{told}"):
        run(plan, react)
    good = resume.newest_good(Path(plan.run_dir) / "checkpoints")[0]
    assert good is None if is_first else good is not None and 8 <= good.update < 120


def test_the_weights_load_in_plain_torch(make: Make) -> None:
    package = pytest.importorskip("safetensors.torch", reason="the safetensors package is not installed")
    plan = make(training={"updates": 2}, pod={"num_instances": 1}, run={"fleet": "inline"})
    run(plan)
    latest = Path(plan.run_dir, "checkpoints", Path(plan.run_dir, "checkpoints", "LATEST").read_text().strip())
    network = networks.build_model(plan.config, 1, 8, 10)
    network.load_state_dict(package.load_file(str(latest / "weights.safetensors")))
    assert all(bool(torch.isfinite(value).all()) for value in network.state_dict().values())


def test_a_second_signal_does_not_wait(make: Make) -> None:
    plan = make(training={"model": "tiny"}, pod={"num_instances": 1}, run={"fleet": "inline"})
    seen: Dict[str, int] = {"updates": 0}

    def react(event: Event) -> None:
        if isinstance(event, UpdateDone):
            seen["updates"] += 1
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        run(plan, react)
    assert seen["updates"] == 1


def test_a_disk_that_is_really_full_costs_no_checkpoint(
    small_disk: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = small_disk(tmp_path / "disk", kib=1536)  # two checkpoints of the small model, and no third beside them
    flags = ["--fleet", "inline", "--device", "emulated", "--updates", "8", "--checkpoint-every", "2 updates"]
    command = [*flags, "--run-dir", str(disk / "run")]
    assert train.main(command) == 1
    told = capsys.readouterr()
    assert "warning: cannot write the checkpoint" in told.out
    (line,) = told.err.strip().splitlines()
    assert os.strerror(errno.ENOSPC) in line
    good, passed_over = resume.newest_good(disk / "run" / "checkpoints")
    assert good is not None
    assert not passed_over
    subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True, timeout=10)
    assert train.main(command) == 0  # the same command goes on
    assert f"from update {good.update} on" in capsys.readouterr().out
    assert train.main([*flags, "--run-dir", str(tmp_path / "undisturbed")]) == 0
    folders = (disk / "run", tmp_path / "undisturbed")
    hashes = {json.loads((folder / "summary.json").read_text())["weights_sha256"] for folder in folders}
    assert len(hashes) == 1
    assert verify_data.verify(disk / "run").is_proved
