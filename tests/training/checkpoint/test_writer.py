"""A checkpoint or snapshot is complete or absent, whatever fails while it is written; its hashes and its costs."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Iterator, List

import numpy as np
import pytest
import torch
import xxhash

from raypod.errors import CheckpointDamaged, CheckpointNotSaved, LeaseLost
from raypod.events import CheckpointBegun, CheckpointFailed, CheckpointSaved, Event, RunEnded, UpdateDone
from raypod.plan.plan import Plan
from raypod.runs import verify_data
from raypod.system import files
from raypod.train import main
from raypod.training.checkpoint import format, resume, storage, writer
from raypod.training.checkpoint.format import FileRecord, Manifest, manifest_from_json
from raypod.training.checkpoint.snapshots import Place, SnapshotMemory, read, write
from raypod.training.checkpoint.storage import checkpoints_folder
from tests.support.faulty_disks import FaultyDisk, FullDisk, Killed
from tests.support.saved_runs import flip_a_bit, run, save, weights_of

Make = Callable[..., Plan]
WEIGHTS = "weights.safetensors"
STATE_MB = 96
FLAGS = ["--fleet", "inline", "--device", "emulated", "--model", "tiny", "--lr-schedule", "constant"]


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
    assert (found.manifest, accuracies) == (tested, {None, 97.5})
    assert len((saved.path / "manifest.sha256").read_text().splitlines()) == 1


def test_the_manifest_records_the_position_and_the_newest_and_the_most_accurate_are_kept(make: Make) -> None:
    plan = make(training={"batch_size": 16})
    path = save(plan, 30).path
    manifest = json.loads((path / "manifest.json").read_text())
    assert (path, plan.updates_per_epoch) == (checkpoints_folder(plan.run_dir) / "update-00000030", 22)
    assert (manifest["epoch"], manifest["position"]) == (1, 8 * 64)
    assert set(manifest["files"]) == {"weights.safetensors", "optimizer.safetensors"}
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
    assert (weights_of(run(plan, react)), begun[0], set(waited)) == (uninterrupted, 8, {True})


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


def test_a_run_folder_that_is_gone_is_not_created_again_and_an_interrupted_write_can_be_closed(
    tmp_path: Path, make: Make, monkeypatch: Any
) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    with storage.unique_file(checkpoints) as path:
        assert path is None
    with pytest.raises(FileNotFoundError), storage.new_checkpoint(checkpoints, 4):
        pytest.fail("the folder of an unmounted disk was created")
    assert not list(tmp_path.iterdir())
    plan = make()
    background = writer.BackgroundWriter(plan)

    def start(thread: threading.Thread) -> None:
        raise LeaseLost("run", "pid 7")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(LeaseLost):
        background.begin(resume.manifest_of(plan, 1, 1, "", {}), writer.State({"weight": torch.ones(2)}, {}))
    background.close()
    assert background.finish() == ()


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format, "LARGE_BYTES", 1)


@pytest.mark.parametrize("is_large", [False, True], ids=["sha256sum", "xxh128sum"])
def test_the_hash_is_that_of_a_common_command(make: Make, monkeypatch: pytest.MonkeyPatch, is_large: bool) -> None:
    algorithm, of = ("xxh3_128", xxhash.xxh3_128) if is_large else ("sha256", hashlib.sha256)
    saved = save(make(), 44)
    size_bytes = min(record.size_bytes for record in saved.manifest.files.values())
    monkeypatch.setattr(format, "LARGE_BYTES", size_bytes if is_large else 1 << 20)
    path = save(make(), 44).path
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == (2 if is_large else 1)
    for name, record in manifest["files"].items():
        content = (path / name).read_bytes()
        assert record == {"size_bytes": len(content), algorithm: of(content).hexdigest()}
    storage.verify(storage.read_manifest(path))


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize("name", [WEIGHTS, "optimizer.safetensors"])
def test_a_damaged_byte_of_a_large_file_is_found_and_named(make: Make, name: str) -> None:
    plan = make()
    older = save(plan, 44)
    flip_a_bit(save(plan, 88).path / name)
    valid, damaged = resume.newest_valid(checkpoints_folder(plan.run_dir))
    assert valid == older
    (message,) = damaged
    assert message.endswith(f"the XXH3-128 of {name} does not match manifest.json")


@pytest.mark.usefixtures("all_are_large")
def test_a_checkpoint_of_before_stays_valid(make: Make) -> None:
    saved = save(make(), 44)
    content = json.loads((saved.path / "manifest.json").read_text())
    files = {name: (saved.path / name).read_bytes() for name in content["files"]}
    sha256 = {name: hashlib.sha256(each).hexdigest() for name, each in files.items()}
    content["files"] = {name: {"size_bytes": len(files[name]), "sha256": each} for name, each in sha256.items()}
    text = json.dumps({**content, "format": 1}, indent=2) + "\n"
    (saved.path / "manifest.json").write_text(text)
    line = f"{hashlib.sha256(text.encode()).hexdigest()}  manifest.json\n"
    (saved.path / "manifest.sha256").write_text(line)
    found = storage.read_manifest(saved.path)
    storage.verify(found)
    assert found.manifest.to_json().decode() == text  # `replace_manifest` depends on it
    flip_a_bit(saved.path / WEIGHTS)
    with pytest.raises(CheckpointDamaged, match=f"the SHA-256 of {WEIGHTS} does not match manifest.json"):
        storage.verify(found)


def test_an_unreadable_file_is_damaged_and_one_has_one_hash(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save(make(), 44)

    def fail(path: Path, algorithm: str) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(format, "digest_of_file", fail)
    with pytest.raises(CheckpointDamaged, match=f"{WEIGHTS}.*Input/output error"):
        storage.verify(saved)
    content = json.loads(Manifest(4, 0, 0, 1, {}, {}, {}, files={WEIGHTS: FileRecord(1, "a")}).to_json())
    for record in ({"size_bytes": 1}, {"size_bytes": 1, "sha256": "a", "xxh3_128": "b"}):
        content["files"][WEIGHTS] = record
        with pytest.raises(ValueError, match="a file has one hash"):
            manifest_from_json(json.dumps(content).encode())


def state_of(update: int) -> List[np.ndarray]:
    return [np.full(size, update, dtype=np.uint8) for size in (3, 1 << 21, update)]


@pytest.fixture
def memory() -> Iterator[SnapshotMemory]:
    with contextlib.closing(SnapshotMemory()) as found:
        yield found


def test_the_two_newest_snapshots_are_kept_until_the_end_of_their_process(memory: SnapshotMemory) -> None:
    assert memory.updates() == []
    for update in (9, 6, 2, 4, 6):  # after 9 the run has gone back
        write(memory.place(), update, state_of(update))
    assert sorted(memory.updates()) == [6, 9]
    for update in (6, 9):
        assert np.array_equal(read(memory.place(), update), np.concatenate(state_of(update)))
    with pytest.raises(FileNotFoundError, match="no snapshot of update 4"):
        read(memory.place(), 4)
    ended = Place(1 << 22, 1, (3, 4))
    for use in (lambda: write(ended, 2, []), lambda: read(ended, 2)):
        with pytest.raises(FileNotFoundError, match="has ended"):
            use()


def test_a_snapshot_whose_writer_has_ended_before_the_end_does_not_count(memory: SnapshotMemory) -> None:
    write(memory.place(), 2, state_of(2))
    write(memory.place(), 4, state_of(4))

    def ends() -> Iterator[np.ndarray]:
        yield from state_of(6)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(memory.place(), 6, ends())
    assert memory.updates() == [4]


PROGRAM = """
import json, sys
from pathlib import Path
import torch
from raypod.training.checkpoint import storage, tensors, writer
from raypod.training.checkpoint.format import Manifest, Retention
def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(key))
def growth(action):
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    result = action()
    return status("VmHWM") - before, result
def state_of(megabytes):
    half = torch.ones(megabytes // 2, 250000)
    return writer.State({"weight": half}, {"momentum": half.clone()})
folder, kept = Path(sys.argv[1]), Retention(3)
warm_up = writer.write_checkpoint(folder, Manifest(2, 0, 0, 1, {}, {}, {}), state_of(2), kept)
storage.verify(warm_up)
writer.load_checkpoint(warm_up.path)
state = state_of(int(sys.argv[2]))
found = {}
found["check"], nonfinite = growth(lambda: writer._first_nonfinite(state))
found["save"], saved = growth(lambda: writer.write_checkpoint(folder, Manifest(4, 0, 0, 1, {}, {}, {}), state, kept))
found["verify"], _ = growth(lambda: storage.verify(saved))
found["load"], loaded = growth(lambda: writer.load_checkpoint(saved.path))
assert nonfinite is None and torch.equal(loaded["weights"]["weight"], state.weights["weight"])
print(json.dumps(found))
"""


@pytest.mark.usefixtures("processes")
def test_the_peak_of_resident_memory(tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this kernel cannot reset the peak of resident memory (/proc/self/clear_refs)")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(STATE_MB)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    grown = json.loads(ended.stdout)
    # The stacks of threads, and the heap; a copy of the largest tensor would be 48 MB.
    assert max(grown["check"], grown["save"], grown["verify"]) < 8, grown
    assert grown["load"] < STATE_MB + 8, grown


# Python imports the module at the start of each process; it records every file that is opened for reading.
RECORDER = """
import os, sys
log = os.open(os.environ["OPENED_FILES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def record(event, arguments):
    # Python 3.8 also reports the call of os.open within open; it has no mode.
    is_read = event == "open" and arguments[1] is not None and not arguments[2] & os.O_CREAT
    if is_read and str(arguments[0]).endswith(".safetensors"):
        os.write(log, f"{os.getpid()} {arguments[0]}\\n".encode())
sys.addaudithook(record)
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("how", ["--resume", "--detach"])
def test_a_resumed_run_reads_each_file_of_its_checkpoint_twice(tmp_path: Path, how: str) -> None:
    """It verifies the checkpoint once, in the process that trains, and reads it once more to load it."""
    folder, log = tmp_path / "run", tmp_path / "opened"
    assert main([*FLAGS, "--run-dir", str(folder), "--updates", "2"]) == 0
    (tmp_path / "sitecustomize.py").write_text(RECORDER)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "state": "interrupted", "exit_code": 130}))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path, "OPENED_FILES": str(log)}

    def run(module: str, *flags: str) -> None:
        line = [sys.executable, "-m", module, *flags]
        done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, env=variables)
        assert done.returncode == 0, done.stderr

    if how == "--resume":
        run("raypod.train", "--resume", str(folder), "--updates", "3")
    else:  # the same command as before
        run("raypod.train", *FLAGS, "--run-dir", str(folder), "--updates", "3", "--detach")
        run("raypod", "attach", str(folder))
    opened = Counter(line.partition(" ")[2] for line in log.read_text().splitlines())
    first = {Path(name).name: count for name, count in opened.items() if "update-00000002" in name}
    assert set(first) >= {"weights.safetensors", "optimizer.safetensors"}
    assert set(first.values()) == {2}
