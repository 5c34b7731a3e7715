"""A checkpoint that is sent to another host is complete or absent there; a fetched one is the same or an error."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Callable, Optional

import pytest
import torch

from raypod.errors import CheckpointDamaged
from raypod.plan.plan import Plan
from raypod.training.checkpoint import format, resume, transfer, writer
from raypod.training.checkpoint.format import Retention
from raypod.training.checkpoint.resume import manifest_of
from raypod.training.checkpoint.storage import checkpoint_path, checkpoints_folder, list_checkpoints
from raypod.training.checkpoint.transfer import CheckpointFiles, CheckpointReceiver
from tests.support.faulty_disks import FaultyDisk, Killed
from tests.support.other_disks import DirectServer, Request
from tests.support.saved_runs import contents, save

Make = Callable[..., Plan]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 100)


@pytest.fixture(params=["sha256", "xxh3_128"])
def algorithm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each hash of a checkpoint's files in turn."""
    monkeypatch.setattr(format, "LARGE_BYTES", 1 << 30 if request.param == "sha256" else 1)
    return str(request.param)


def send(plan: Plan, server: Any, update: int, keep: int = 3) -> None:
    """Send the checkpoint that `save` writes."""
    optimizer = {"param_groups": [{"lr": 0.1, "params": [0]}], "momentum": torch.full((3,), float(update))}
    state = writer.State({"layer.weight": torch.full((2, 3), float(update))}, optimizer)
    kept = Retention(keep, plan.best_metric)
    writer.send_checkpoint(server, manifest_of(plan, update, 1, "", {}), state, kept, 60)


def test_a_sent_checkpoint_has_the_files_of_a_written_one(make: Make, tmp_path: Path, algorithm: str) -> None:
    plan, there = make(), tmp_path / "there"
    server = DirectServer(CheckpointReceiver(str(there)))
    for update in (44, 88, 132):
        save(plan, update, keep=2)
        send(plan, server, update, keep=2)
    assert contents(there) == contents(checkpoints_folder(plan.run_dir))
    assert {"update-00000132/weights.safetensors", "LATEST"} < set(contents(there))
    assert server.methods.count("write") > 6
    (sent, *_), _ = list_checkpoints(there)
    assert {record.algorithm for record in sent.manifest.files.values()} == {algorithm}


def damaged(request: Request) -> Request:
    method, (name, data) = request
    return method, (name, bytes([data[0] ^ 1]) + data[1:])


@pytest.mark.parametrize("fault", [damaged, lambda request: None], ids=["damaged", "lost"])
def test_a_chunk_that_is_damaged_or_lost_leaves_no_checkpoint(
    make: Make, algorithm: str, fault: Callable[[Request], Optional[Request]]
) -> None:
    plan = make()
    before = contents(save(plan, 44).path.parent)
    receiver = CheckpointReceiver(str(checkpoints_folder(plan.run_dir)))
    counted = DirectServer(CheckpointReceiver(str(Path(plan.run_dir, "elsewhere"))))
    send(plan, counted, 88)
    assert counted.methods.count("write") > 3
    for number, method in enumerate(counted.methods, 1):
        if method == "write":
            server = DirectServer(receiver, lambda at, each, bad=number: fault(each) if at == bad else each)
            with pytest.raises(ConnectionError, match="differ from those that were sent"):
                send(plan, server, 88)
            assert contents(checkpoints_folder(plan.run_dir)) == before
    send(plan, DirectServer(receiver), 88)
    assert resume.newest_valid(checkpoints_folder(plan.run_dir))[0].update == 88  # type: ignore[union-attr]


@pytest.mark.parametrize("killed", ["sender", "receiver", "full disk"])
def test_a_failure_at_any_point_loses_no_checkpoint(make: Make, monkeypatch: pytest.MonkeyPatch, killed: str) -> None:
    plan = make()
    checkpoints = checkpoints_folder(plan.run_dir)
    save(plan, 44)

    def die(at: int, request: Request) -> Request:
        if killed == "sender" and at == failures:
            raise Killed
        return request

    for failures in range(1, 100):
        receiver = CheckpointReceiver(str(checkpoints))
        with monkeypatch.context() as patched:
            if killed != "sender":
                FaultyDisk(patched, failures, full=killed == "full disk")
            try:
                send(plan, DirectServer(receiver, die), 88)
                break
            except (Killed, OSError):
                pass
        valid, damaged = resume.newest_valid(checkpoints)
        assert valid is not None
        assert valid.update in (44, 88)
        assert not damaged
        writer.load_checkpoint(valid.path)
        if killed == "full disk":
            assert not [path for path in checkpoints.iterdir() if path.suffix], "leftovers remain"
        # The next one is written, by a new receiver if this one was killed.
        next_receiver = CheckpointReceiver(str(checkpoints)) if killed == "receiver" else receiver
        send(plan, DirectServer(next_receiver), 132)
        assert not [path for path in checkpoints.iterdir() if path.suffix], "leftovers remain"
        assert resume.newest_valid(checkpoints)[0].update == 132  # type: ignore[union-attr]
        for update in (88, 132):
            shutil.rmtree(str(checkpoint_path(checkpoints, update)), ignore_errors=True)
    assert failures > 5


def test_a_file_outside_the_checkpoint_is_refused(tmp_path: Path) -> None:
    receiver = CheckpointReceiver(str(tmp_path / "checkpoints"))
    receiver.begin(4)
    with pytest.raises(ValueError, match="no file of a checkpoint"):
        receiver.write("../../stolen", b"")
    with pytest.raises(ValueError, match="no file of a checkpoint"):
        CheckpointFiles(str(tmp_path)).read("../stolen", 0)


def test_a_fetched_checkpoint_is_the_same_or_an_error(make: Make, tmp_path: Path, algorithm: str) -> None:
    saved = save(make(), 44)
    served = CheckpointFiles(str(saved.path))
    (tmp_path / "copy").mkdir()
    transfer.fetch(DirectServer(served), saved, tmp_path / "copy", 60)
    assert contents(tmp_path / "copy").items() < contents(saved.path).items()
    assert set(contents(tmp_path / "copy")) == set(saved.manifest.files)
    content = (saved.path / "weights.safetensors").read_bytes()
    for number, damaged in enumerate((content[:-1], content[:-1] + bytes([content[-1] ^ 1]), b"")):
        (saved.path / "weights.safetensors").write_bytes(damaged)
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(CheckpointDamaged, match="weights.safetensors differs"):
            transfer.fetch(DirectServer(served), saved, folder, 60)
