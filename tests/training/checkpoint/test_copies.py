"""Which hosts keep copies of a checkpoint; a copy is complete or absent, and the newest one is kept."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Callable, Dict, List, Optional

import pytest

from raypod.plan import layout
from raypod.plan.plan import Plan
from raypod.runs import run_state
from raypod.runtime.coordinator import checkpoint_copies
from raypod.training.checkpoint import resume, transfer
from raypod.training.checkpoint.format import Checkpoint
from raypod.training.checkpoint.storage import checkpoints_folder
from raypod.training.checkpoint.transfer import CopyReceiver, copy_hosts, held_copies
from tests.support.faulty_disks import FaultyDisk, Killed
from tests.support.other_disks import DirectServer, Fault, Request, unchanged
from tests.support.saved_runs import contents, save

Make = Callable[..., Plan]
RUN = "run-12345678"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 300)


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


def send(checkpoint: Checkpoint, receiver: CopyReceiver, fault: Fault = unchanged) -> DirectServer:
    server = DirectServer(receiver, fault)
    with checkpoint_copies.open_source(checkpoint.path.parent.parent, checkpoint.path) as source:
        checkpoint_copies.send_source(server, source, RUN, 60, lambda: False)
    return server


def test_a_copy_is_a_run_folder_that_was_interrupted_after_the_checkpoint(make: Make, tmp_path: Path) -> None:
    plan = make()
    receiver = CopyReceiver(str(tmp_path / "there"), RUN)
    for update in (44, 88):
        checkpoint = saved(plan, update)
        with Path(plan.run_dir, "metrics.jsonl").open("a") as file:
            file.write('{"update": ')  # a line that is being written
        send(checkpoint, receiver)
    ((age, copy),) = held_copies(tmp_path / "there" / RUN)
    assert (age, copy.name) == ((1, 88), "000001-00000088")
    assert contents(copy / "checkpoints" / "update-00000088") == contents(checkpoint.path)
    assert (copy / "ledger.jsonl").read_bytes() == Path(plan.run_dir, "ledger.jsonl").read_bytes()
    assert len((copy / "metrics.jsonl").read_text().splitlines()) == 88
    assert (copy / "evaluations.jsonl").read_bytes() == b""
    state = run_state.read(copy)
    assert state is not None
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
    methods = send(saved(plan, 44), receiver).methods
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
            send(newer, receiver, change)
        if methods[bad - 1] == "write" or (there / RUN / "copy.partial").exists():
            receiver.discard()
            assert contents(there) == before
        else:  # the request has no bytes: it creates a file
            shutil.rmtree(str(there / RUN / "000001-00000088"))
            send(saved(plan, 44), receiver)
            newer, before = saved(plan, 88), contents(there)
    send(newer, receiver)
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
        send(older, CopyReceiver(str(there), RUN))
        with monkeypatch.context() as patched:
            if killed != "sender":
                FaultyDisk(patched, failures, full=killed == "full disk")
            try:
                send(newer, CopyReceiver(str(there), RUN), die)
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
        send(newer, receiver)
        receiver.close()
        assert [path.name for path in (there / RUN).iterdir()] == ["000001-00000088"], "leftovers remain"
    assert seen.count(44) > 5


def test_an_older_coordinator_cannot_replace_a_newer_copy(make: Make, tmp_path: Path) -> None:
    plan, receiver = make(), CopyReceiver(str(tmp_path / "there"), RUN)
    send(saved(plan, 44, generation=2), receiver)
    with pytest.raises(FileExistsError, match="newer copy of this run, of generation 2"):
        send(saved(plan, 88, generation=1), receiver)
    assert receiver.open("mark", ()).held == (2, 44)


def test_two_hosts_on_one_disk_are_found(tmp_path: Path) -> None:
    first, second = (CopyReceiver(str(tmp_path), RUN) for _ in range(2))
    assert first.open("a", ()).shares_with is None
    assert second.open("b", ("x", "a")).shares_with == "a"
    first.close()
    assert second.open("b", ("x", "a")).shares_with is None
    second.close()
    assert not (tmp_path / RUN).exists()


def test_only_files_of_a_run_are_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no name of a run"):
        CopyReceiver(str(tmp_path), "../x")
    receiver = CopyReceiver(str(tmp_path), RUN)
    receiver.begin(4)
    for name in ("../stolen", "run.json", "logs/x"):
        with pytest.raises(ValueError, match="no file of a run folder"):
            receiver.write_file(name, b"")
    receiver.close()
    assert not (tmp_path / RUN).exists()
    assert transfer.copy_name((1, 4)) == "000001-00000004"
