"""Slow and full disks during training: the weights of an undisturbed run, and a checkpoint at its end."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any, Callable

import pytest
from bounded import wait_until
from harness import assert_undisturbed, plan_for, run, send

from raypod.checkpoint import resume
from raypod.events import CheckpointFailed
from raypod.plan.plan import Plan

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
OWN = {"data": {"dataset": "fragile:data"}, "training": {"model": "fragile:model", "warmup_updates": 1, "updates": 60}}


def checkpoints_of(plan: Plan) -> Path:
    return Path(plan.run_dir) / "checkpoints"


def assert_checkpoints_valid(plan: Plan) -> None:
    """Assert that the last state is saved, and that no checkpoint is damaged or partial."""
    good, passed_over = resume.newest_valid(checkpoints_of(plan))
    assert good is not None
    assert (good.update, passed_over) == (plan.total_updates, [])
    assert not [path for path in checkpoints_of(plan).iterdir() if path.suffix]


def test_instance_0_is_killed_while_it_writes_a_checkpoint(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(Path(__file__).parent / "fragile.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    inline = plan_for(tmp_path / "inline", **OWN, run={"fleet": "inline"}, pod={"num_instances": 1})
    reference = run(inline)
    (tmp_path / "slow-disk").touch()
    plan = plan_for(tmp_path / "ray", **OWN, run={"checkpoint_every": "20 updates"}, pod={"num_instances": 2})

    def kill_the_writer(plan: Plan) -> None:
        folder = checkpoints_of(plan)
        assert wait_until(lambda: folder.is_dir() and any(path.suffix for path in folder.iterdir()))
        assert not (folder / "LATEST").exists()  # the first one is not finished
        send(signal.SIGKILL, 0)(plan)

    outcome = run(plan, [(21, kill_the_writer)])
    assert_undisturbed(plan, outcome, reference)
    assert [loss.instance for loss in outcome.losses] == [0]
    assert outcome.repairs[0].seeded_from == "instance 1"
    assert_checkpoints_valid(plan)


def test_a_full_disk_prevents_checkpoints_but_does_not_end_the_run(
    session: Any, tmp_path: Path, small_disk: Callable[..., Path]
) -> None:
    reference = run(plan_for(tmp_path / "inline", run={"fleet": "inline"}, pod={"num_instances": 1}))
    small_disk(tmp_path / "ray" / "run" / "checkpoints", kib=4096)
    plan = plan_for(tmp_path / "ray", run={"checkpoint_every": "6 updates"}, pod={"num_instances": 2})
    filler = checkpoints_of(plan) / "filler"

    def fill(plan: Plan) -> None:
        assert wait_until((checkpoints_of(plan) / "LATEST").is_file)
        filler.write_bytes(bytes(shutil.disk_usage(checkpoints_of(plan)).free))
        assert shutil.disk_usage(checkpoints_of(plan)).free == 0

    outcome = run(plan, [(7, fill), (21, lambda plan: filler.unlink())], are_repaired=False)
    assert_undisturbed(plan, outcome, reference)
    failed = [event.update for event in outcome.of(CheckpointFailed)]
    assert failed
    assert set(failed) <= {12, 18}
    assert_checkpoints_valid(plan)
