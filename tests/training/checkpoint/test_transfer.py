"""Checkpoints and copies of runs that are sent to another host are complete or absent there; fetched ones are equal."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import pytest
import torch

from raypod.errors import CheckpointDamaged
from raypod.plan import layout
from raypod.plan.plan import Plan
from raypod.runs import run_state
from raypod.runs.upload import copy_folder
from raypod.runs.upload.copies import copy_hosts, open_source, send_source
from raypod.runs.upload.copy_folder import CopyReceiver, held_copies
from raypod.training.checkpoint import format, resume, transfer, writer
from raypod.training.checkpoint.format import Checkpoint, Retention
from raypod.training.checkpoint.resume import manifest_of
from raypod.training.checkpoint.storage import checkpoint_path, checkpoints_folder, list_checkpoints
from raypod.training.checkpoint.transfer import CheckpointFiles, CheckpointReceiver
from tests.support.faulty_disks import FaultyDisk, Killed
from tests.support.other_disks import DirectServer, Fault, Request, unchanged
from tests.support.saved_runs import contents, save

Make = Callable[..., Plan]
RUN = "run-12345678"


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


def test_only_files_of_a_checkpoint_or_of_a_run_are_written(tmp_path: Path) -> None:
    receiver = CheckpointReceiver(str(tmp_path / "checkpoints"))
    receiver.begin(4)
    with pytest.raises(ValueError, match="no file of a checkpoint"):
        receiver.write("../../stolen", b"")
    with pytest.raises(ValueError, match="no file of a checkpoint"):
        CheckpointFiles(str(tmp_path)).read("../stolen", 0)
    with pytest.raises(ValueError, match="no name of a run"):
        CopyReceiver(str(tmp_path), "../x")
    receiver = CopyReceiver(str(tmp_path), RUN)
    receiver.begin(4)
    for name in ("../stolen", "run.json", "logs/x"):
        with pytest.raises(ValueError, match="no file of a run folder"):
            receiver.write_file(name, b"")
    receiver.close()
    assert not (tmp_path / RUN).exists()
    assert copy_folder.copy_name((1, 4)) == "000001-00000004"


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


@pytest.mark.parametrize(
    ("peers", "number", "failures", "chosen"),
    [
        ("b c d", 1, {}, ""),
        ("b c d", 2, {}, "b"),
        ("b c d", 3, {}, "b c"),
        ("b c d", 9, {}, "b c d"),
        ("", 2, {}, ""),
        ("b c d", 2, {"b": 1}, "c"),  # the next one takes its place
        ("b c d", 3, {"b": 1}, "c d"),
        ("b c d", 2, {"b": 1, "c": 1}, "d"),
        ("b c d", 2, {"b": 1, "c": 1, "d": 1}, "b"),
        ("c d", 2, {"c": 3}, "d"),
        ("c", 2, {"c": 3}, "c"),
    ],
)
def test_a_host_keeps_its_copies_until_it_fails(peers: str, number: int, failures: Dict[str, int], chosen: str) -> None:
    assert copy_hosts(peers.split(), number, failures) == chosen.split()


def saved(plan: Plan, update: int, generation: int = 1) -> Checkpoint:
    """Write a checkpoint, and the files of its run, which have a line for each update."""
    folder = Path(plan.run_dir)
    found = save(plan, update, keep=2, generation=generation)
    for name in ("metrics.jsonl", "ledger.jsonl"):
        (folder / name).write_text("".join(f'{{"update": {each}}}\n' for each in range(1, update + 1)))
    (folder / "config.yaml").write_text("training: {}\n")
    (folder / "evaluations.jsonl").touch()
    state = run_state.RunState(1, 2, "head", run_state.RUNNING, update + 3, 200, status_port=9, status_token_file="t")
    state = dataclasses.replace(state, submission_id="job")
    (folder / layout.STATE).write_text(json.dumps(vars(state)))
    return found


def send_copy(checkpoint: Checkpoint, receiver: CopyReceiver, fault: Fault = unchanged) -> DirectServer:
    server = DirectServer(receiver, fault)
    with open_source(checkpoint.path.parent.parent, checkpoint.path) as source:
        send_source(server, source, RUN, 60, lambda: False)
    return server


def test_a_copy_is_a_run_folder_that_was_interrupted_after_the_checkpoint(make: Make, tmp_path: Path) -> None:
    plan = make()
    receiver = CopyReceiver(str(tmp_path / "there"), RUN)
    for update in (44, 88):
        checkpoint = saved(plan, update)
        with Path(plan.run_dir, "metrics.jsonl").open("a") as file:
            file.write('{"update": ')  # a line that is being written
        send_copy(checkpoint, receiver)
    ((age, copy),) = held_copies(tmp_path / "there" / RUN)
    assert (age, copy.name) == ((1, 88), "000001-00000088")
    assert contents(copy / "checkpoints" / "update-00000088") == contents(checkpoint.path)
    assert (copy / "ledger.jsonl").read_bytes() == Path(plan.run_dir, "ledger.jsonl").read_bytes()
    assert len((copy / "metrics.jsonl").read_text().splitlines()) == 88
    assert (copy / "evaluations.jsonl").read_bytes() == b""
    state = run_state.read(copy)
    assert (state.state, state.update, state.may_be_running) == (run_state.INTERRUPTED, 88, False)
    assert (state.status_port, state.status_token_file, state.submission_id) == (None, None, None)
    assert run_state.is_unfinished(copy)
    index = json.loads((copy / "run.json").read_text())
    assert (index["run_id"], index["run_dir"], index["checkpoint"]) == (RUN, plan.run_dir, "update-00000088")
    assert set(index["files"]) == set(contents(copy)) - {"run.json"}
    assert resume.newest_valid(checkpoints_folder(copy))[0].update == 88  # type: ignore[union-attr]


DAMAGES: Dict[str, Callable[[bytes], Optional[bytes]]] = {
    "damaged": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "lost": lambda data: None,
    "truncated": lambda data: data[:-1],
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_copy_whose_transfer_is_damaged_is_absent(make: Make, tmp_path: Path, damage: str) -> None:
    plan, there = make(), tmp_path / "there"
    receiver = CopyReceiver(str(there), RUN)
    methods = send_copy(saved(plan, 44), receiver).methods
    before, newer = contents(there), saved(plan, 88)
    writes = [number for number, method in enumerate(methods, 1) if method.startswith("write")]
    assert len(writes) > 10
    for bad in writes:

        def change(at: int, request: Request, bad: int = bad) -> Optional[Request]:
            method, arguments = request
            if at != bad or not arguments[1]:  # without bytes: the beginning of a file
                return request
            data = DAMAGES[damage](arguments[1])
            return None if data is None else (method, (arguments[0], data))

        with contextlib.suppress(ConnectionError):
            send_copy(newer, receiver, change)
        if methods[bad - 1] == "write" or (there / RUN / "copy.partial").exists():
            receiver.discard()
            assert contents(there) == before
        else:  # the request has no bytes: it creates a file
            shutil.rmtree(str(there / RUN / "000001-00000088"))
            send_copy(saved(plan, 44), receiver)
            newer, before = saved(plan, 88), contents(there)
    send_copy(newer, receiver)
    assert [age for age, _ in held_copies(there / RUN)] == [(1, 88)]


@pytest.mark.parametrize("killed", ["sender", "receiver", "full disk"])
def test_a_failure_at_any_point_leaves_the_newer_or_the_older_copy(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 2000)
    plan, there = make(), tmp_path / "there"
    older, newer = saved(plan, 44), saved(plan, 88)
    seen: List[int] = []

    def die(at: int, request: Request) -> Request:
        if killed == "sender" and at == failures:
            raise Killed
        return request

    for failures in range(1, 200):
        shutil.rmtree(str(there), ignore_errors=True)
        send_copy(older, CopyReceiver(str(there), RUN))
        with monkeypatch.context() as patched:
            if killed != "sender":
                FaultyDisk(patched, failures, full=killed == "full disk")
            try:
                send_copy(newer, CopyReceiver(str(there), RUN), die)
                break
            except (Killed, OSError):
                pass
        (age, copy), *rest = held_copies(there / RUN)
        assert age in ((1, 44), (1, 88))
        assert [each for each, _ in rest] == ([(1, 44)] if age == (1, 88) and rest else [])
        index = json.loads((copy / "run.json").read_text())
        assert set(index["files"]) == set(contents(copy)) - {"run.json"}
        assert resume.newest_valid(checkpoints_folder(copy))[0].update == age[1]  # type: ignore[union-attr]
        seen.append(age[1])
        receiver = CopyReceiver(str(there), RUN)  # that of the next attempt
        assert receiver.open("mark", ()).held == age
        send_copy(newer, receiver)
        receiver.close()
        assert [path.name for path in (there / RUN).iterdir()] == ["000001-00000088"], "leftovers remain"
    assert seen.count(44) > 5


def test_an_older_coordinator_cannot_replace_a_newer_copy_and_two_hosts_on_one_disk_are_found(
    make: Make, tmp_path: Path
) -> None:
    plan, receiver = make(), CopyReceiver(str(tmp_path / "there"), RUN)
    send_copy(saved(plan, 44, generation=2), receiver)
    with pytest.raises(FileExistsError, match="newer copy of this run, of generation 2"):
        send_copy(saved(plan, 88, generation=1), receiver)
    assert receiver.open("mark", ()).held == (2, 44)
    first, second = (CopyReceiver(str(tmp_path), RUN) for _ in range(2))
    assert first.open("a", ()).shares_with is None
    assert second.open("b", ("x", "a")).shares_with == "a"
    first.close()
    assert second.open("b", ("x", "a")).shares_with is None
    second.close()
    assert not (tmp_path / RUN).exists()
