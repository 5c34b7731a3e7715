"""The mirror of a run in this process, with a scripted coordinator, on a storage that can fail at any operation."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any, Iterator, List, Optional

import pytest

from raypod.plan import layout
from raypod.runs.upload import mirror_record
from raypod.runs.upload.mirrored_files import MirroredCheckpoints, MirroredFiles
from raypod.runs.upload.remote_index import RemoteIndex
from raypod.runs.upload.remote_run import RemoteRun
from raypod.system.companion import write_state
from raypod.system.files import FilePart, replace_file
from raypod.system.remote.store import Store
from raypod.training.checkpoint import storage
from raypod.training.checkpoint.format import Retention
from tests.support.faulty_disks import FlushedFiles, Killed
from tests.support.mirrored_runs import (
    ACCURACY,
    LARGE,
    Script,
    different_files,
    faults,
    mirror,
    name_of,
    save,
    summary_of,
    verified,
    whole_checkpoints,
    write_run,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "a run")


def test_a_run_is_mirrored_as_its_lines_and_checkpoints_come(run: Path, url: str, remote: Path, tmp_path: Path) -> None:
    def checked(checkpoints: int) -> mirror_record.MirrorRecord:
        found = mirror_record.read(run)
        assert (found.checkpoints, found.pending, found.error, found.is_complete) == (checkpoints, (), "", False)
        assert (remote / "a run" / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
        return found

    def grow() -> None:
        assert checked(1).place == f"{url}/a run"
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"update": 2}\n')

    def save_second() -> str:
        checked(1)
        return save(run, 2)

    save(run, 1, LARGE)
    script = Script(grow, save_second, lambda: checked(2))
    found = mirror(run, url, script=script)
    assert script.waits_s == [10.0] * 3
    assert (found.is_complete, found.failures, found.pending, found.skipped_checkpoints) == (True, 0, (), 0)
    assert verified(url, "a run", tmp_path / "copy") == [name_of(1), name_of(2)]
    assert not different_files(run, tmp_path / "copy")
    summary = json.loads((tmp_path / "copy" / "summary.json").read_text())
    assert (summary["updates"], summary["storage"]["checkpoints"]) == (1, 2)
    assert (summary["storage"]["url"], summary["storage"]["not_mirrored"]) == (f"{url}/a run", [])
    names = {path.name for path in remote.rglob("*")}
    assert not names & {"status-token", "lease-1.json", "storage.json", "storage.lock"}
    assert mirror(run, url).checkpoints == 2, "what is on the storage is not uploaded again"


@pytest.mark.parametrize(("keep", "kept"), [(1, [1, 4]), (2, [1, 3, 4]), (9, [1, 2, 3, 4])])
def test_retention_keeps_the_newest_and_the_best(run: Path, url: str, tmp_path: Path, keep: int, kept: Any) -> None:
    for update, accuracy in ((1, 90.0), (2, 10.0), (3, 20.0)):
        save(run, update, accuracy=accuracy)
    mirror(run, url, kept=Retention(keep, ACCURACY))
    save(run, 4, keep=2, accuracy=30.0)  # fewer are kept on the host
    mirror(run, url, kept=Retention(keep, ACCURACY))
    assert verified(url, "a run", tmp_path / "copy") == [name_of(update) for update in kept]


def test_a_checkpoint_that_is_removed_on_the_host_is_complete_or_counted(run: Path, url: str, tmp_path: Path) -> None:
    name = save(run, 1)

    def remove(operation: str, path: str) -> None:
        if operation == "open":
            shutil.rmtree(str(run / "checkpoints" / name), ignore_errors=True)

    checkpoints = MirroredCheckpoints(run, Store(f"{url}/a run"), Retention(3))
    with faults(remove):
        checkpoints.sync()
    assert (checkpoints.uploads, checkpoints.skipped) == (1, set())
    assert whole_checkpoints(url, "a run", tmp_path / "copy") == [name]
    checkpoints.announce(name_of(7))
    save(run, 8)
    checkpoints.sync()
    assert (checkpoints.uploads, checkpoints.skipped) == (2, {name_of(7)})


@pytest.mark.parametrize("damaged", [1, 2, 4])
def test_a_damaged_checkpoint_blocks_nothing(run: Path, url: str, remote: Path, tmp_path: Path, damaged: int) -> None:
    names = [name_of(update) for update in range(1, 5)]

    def save_and_damage(update: int) -> str:
        weights = run / "checkpoints" / save(run, update) / "weights.safetensors"
        if update == damaged:
            weights.write_bytes(weights.read_bytes()[:-1] + b"?")
        return name_of(update)

    script = Script(*(lambda update=update: save_and_damage(update) for update in range(1, 5)), lambda: None)
    found = mirror(run, url, script=script, kept=Retention(2))
    left = names[:-1] if damaged == 4 else names
    pending = (name_of(damaged),) if damaged == 4 else ()
    state = (found.pending, found.is_complete, found.skipped_checkpoints, found.failures)
    assert state == (pending, damaged != 4, 0, 0)
    assert whole_checkpoints(url, "a run", tmp_path / "copy") == left[-2:]
    assert (remote / "a run" / "checkpoints" / "LATEST").read_text() == f"{names[-1]}\n"
    assert summary_of(remote / "a run")["storage"]["not_mirrored"] == list(found.pending)
    if damaged == 4:
        assert f"{name_of(damaged)}" in found.error
        weights = run / "checkpoints" / name_of(damaged) / "weights.safetensors"
        shutil.rmtree(str(weights.parent))
        save(run, damaged)
        assert mirror(run, url, kept=Retention(2)).is_complete
        assert whole_checkpoints(url, "a run", tmp_path / "again") == names[-2:]


@pytest.mark.parametrize("is_passing", [False, True])
def test_unreadable_files_block_nothing(run: Path, url: str, remote: Path, monkeypatch: Any, is_passing: bool) -> None:
    chunks, is_bad = FilePart.chunks, True

    def read(self: FilePart, *size: int) -> Iterator[bytes]:
        if is_bad and getattr(self.file, "name", "").endswith("metrics.jsonl"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return chunks(self, *size)

    def end() -> None:
        nonlocal is_bad
        assert mirror_record.read(run).pending == ("metrics.jsonl",)
        assert mirror_record.read(run).error.endswith("Input/output error: 'metrics.jsonl'")
        is_bad = not is_passing

    monkeypatch.setattr(FilePart, "chunks", read)
    found = mirror(run, url, script=Script(lambda: save(run, 1), end))
    assert (found.is_complete, found.pending) == (is_passing, () if is_passing else ("metrics.jsonl",))
    assert different_files(run, remote / "a run") == (set() if is_passing else {"metrics.jsonl"})
    assert summary_of(remote / "a run")["storage"]["not_mirrored"] == list(found.pending)


def test_an_evaluation_replaces_the_manifest_and_weights_the_checkpoint(run: Path, url: str, tmp_path: Path) -> None:
    name = save(run, 1)
    checkpoints = MirroredCheckpoints(run, Store(f"{url}/a run"), Retention(3, ACCURACY))
    checkpoints.sync()
    (local,), _ = storage.list_checkpoints(run / "checkpoints")
    hashes = run / "checkpoints" / name / "manifest.sha256"
    before = hashes.read_bytes()
    storage.replace_manifest(local, type(local.manifest)(**{**vars(local.manifest), "tested": {"accuracy": 12.0}}))
    after = hashes.read_bytes()
    hashes.write_bytes(before + after)  # as just before the end of the replacement
    assert checkpoints.pending() == [name]
    checkpoints.sync()
    assert (checkpoints.uploads, checkpoints.pending()) == (1, [])
    assert Store(f"{url}/a run").read(f"checkpoints/{name}/manifest.sha256") == after
    assert whole_checkpoints(url, "a run", tmp_path / "copy") == [name]
    (copy,), _ = storage.list_checkpoints(tmp_path / "copy" / "checkpoints")
    assert copy.manifest.tested == {"accuracy": 12.0}
    shutil.rmtree(str(run / "checkpoints" / name))
    save(run, 1, LARGE)
    checkpoints.sync()
    assert checkpoints.uploads == 2
    assert whole_checkpoints(url, "a run", tmp_path / "again") == [name]
    weights = Path("checkpoints", name, "weights.safetensors")
    assert (tmp_path / "again" / weights).read_bytes() == (run / weights).read_bytes()


def test_another_run_and_other_files_are_not_overwritten(run: Path, url: str, remote: Path, tmp_path: Path) -> None:
    mirror(run, url)
    before = (remote / "a run" / "index.json").read_bytes()
    found = mirror(write_run(tmp_path / "other" / "a run"), url)
    assert "/a run holds another run; use another --run-dir" in found.error
    assert (found.error, found.is_complete, found.failures) == (found.last_error, False, 0)
    assert found.pending[:2] == ("config.yaml", "metrics.jsonl")
    assert (remote / "a run" / "index.json").read_bytes() == before
    (remote / "theses").mkdir()
    (remote / "theses" / "thesis.pdf").touch()
    assert "holds other files" in mirror(write_run(tmp_path / "theses"), url).error
    assert [path.name for path in (remote / "theses").iterdir()] == ["thesis.pdf"]


@pytest.mark.parametrize("damage", [b"", b"{", None])
def test_a_lost_identity_is_known_by_the_event_log(run: Path, url: str, remote: Path, damage: Optional[bytes]) -> None:
    log = b'{"unix_s": 1.5, "event": "process_started", "pid": 7, "host": "a"}\n'
    (run / "events.jsonl").write_bytes(log)
    mirror(run, url)
    before = json.loads((remote / "a run" / "index.json").read_text())["run_id"]
    memory_file = run / layout.STORAGE
    memory_file.unlink() if damage is None else memory_file.write_bytes(damage)
    (run / "events.jsonl").write_bytes(log + b'{"event": "run_started"}\n')
    found = mirror(run, url)
    assert (found.error, found.is_complete, found.run_id) == ("", True, before)
    memory_file.write_bytes(b"")
    (run / "events.jsonl").write_bytes(log.replace(b"1.5", b"1.6"))
    assert "holds another run" in mirror(run, url).error


def test_a_loss_of_power_keeps_the_identity_of_a_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = FlushedFiles(monkeypatch)
    write_state(run / "storage.json", mirror_record.MirrorRecord("the run"))
    assert flushed.survive(run / layout.STORAGE)


def test_a_run_that_goes_on_is_not_complete_because_it_was_before(run: Path, url: str) -> None:
    assert mirror(run, url).is_complete
    save(run, 1)
    seen: List[bool] = []
    assert mirror(run, url, lambda: seen.append(mirror_record.read(run).is_complete)).is_complete
    assert seen == [False]


def test_an_older_process_of_the_run_ends_when_another_one_mirrors_it(run: Path, url: str, tmp_path: Path) -> None:
    def take_over() -> str:
        copy = Path(shutil.copytree(str(run), str(tmp_path / "taken over" / "a run")))
        assert mirror(copy, url).is_complete
        (run / "metrics.jsonl").write_text("{}\n")
        return name_of(1)

    found = mirror(run, url, take_over, lambda: pytest.fail("it has ended"))
    assert "another process mirrors the run" in found.error


@pytest.mark.parametrize("at", ["half", "close"])
def test_a_pod_that_was_cut_off_removes_nothing_of_its_successor(run: Path, url: str, tmp_path: Path, at: str) -> None:
    save(run, 1)
    new = tmp_path / "new" / "a run"

    def take_over(operation: str, path: str) -> None:  # during or at the end of the slow upload of the first pod
        if operation == at and "weights" in path and not new.exists():
            shutil.copytree(str(run), str(new))
            for update in (2, 3):
                save(new, update)
            assert mirror(new, url, kept=Retention(2)).is_complete

    with faults(take_over):
        found = mirror(run, url, kept=Retention(1))
    assert "another process mirrors the run" in found.error
    assert whole_checkpoints(url, "a run", tmp_path / "copy") == [name_of(2), name_of(3)]


def test_a_later_process_that_begins_in_an_outage_takes_the_place_after_it(run: Path, url: str, tmp_path: Path) -> None:
    """It is not the one of the index yet, and none has taken its place."""
    save(run, 1)
    assert mirror(run, url).is_complete
    later = tmp_path / "later" / "a run"
    shutil.copytree(str(run), str(later))
    save(later, 2)
    left = [ConnectionError("lost")] * 3

    def fail(operation: str, path: str) -> None:
        if operation == "open" and "index.json" in path and left:
            raise left.pop()

    with faults(fail):
        found = mirror(later, url)
    assert (found.is_complete, found.failures) == (True, 3)
    assert whole_checkpoints(url, "a run", tmp_path / "copy") == [name_of(1), name_of(2)]


def test_a_checkpoint_that_appears_after_the_listing_is_not_removed(run: Path, url: str, remote: Path) -> None:
    save(run, 1)
    foreign = remote / "a run" / "checkpoints" / name_of(9)

    def add(operation: str, path: str) -> None:
        if operation == "half" and "weights" in path:
            foreign.mkdir(parents=True, exist_ok=True)
            (foreign / "weights.safetensors").touch()

    checkpoints = MirroredCheckpoints(run, Store(f"{url}/a run"), Retention(3))
    with faults(add):
        checkpoints.sync()
    assert foreign.exists()
    checkpoints.sync()
    assert not foreign.exists(), "what an interrupted upload has left is removed"


def test_objects_removed_or_truncated_are_uploaded_again(run: Path, url: str, remote: Path, tmp_path: Path) -> None:
    names = [save(run, 1), save(run, 2)]

    def damage() -> None:
        assert mirror_record.read(run).checkpoints == 2
        folder = remote / "a run"
        (folder / "checkpoints" / names[0] / "weights.safetensors").unlink()
        (folder / "checkpoints" / names[1] / "weights.safetensors").write_bytes(b"short")
        (folder / "metrics.jsonl").unlink()
        (folder / "config.yaml").write_bytes(b"x")
        (folder / "index.json").unlink()

    assert mirror(run, url, damage).checkpoints == 4
    assert verified(url, "a run", tmp_path / "copy") == names
    assert not different_files(run, tmp_path / "copy")


def test_a_file_that_changes_while_it_is_uploaded_is_uploaded_again(run: Path, url: str) -> None:
    def grow() -> None:
        with (run / "metrics.jsonl").open("a") as file:
            file.write("grown\n")

    store = Store(f"{url}/a run")
    index = RemoteIndex(store, "run id", "writer", is_known=False)
    index.check()
    with (run / "metrics.jsonl").open("rb") as file:
        part = FilePart(file, (run / "metrics.jsonl").stat().st_size)
        grow()
        assert sum(map(len, part.chunks(3))) == part.size_bytes
    files = MirroredFiles(run, store, index)
    files.sync(["metrics.jsonl"])
    assert "metrics.jsonl" not in files.pending()
    grow()
    assert "metrics.jsonl" in files.pending()


# ---- faults of the storage -------------------------------------------------------------------------------------------


def sync(run: Path, url: str) -> None:
    store = Store(f"{url}/a run")
    index = RemoteIndex(store, "run id", "writer", is_known=True)
    files = MirroredFiles(run, store, index)
    index.check()
    files.sync(files.pending())
    MirroredCheckpoints(run, store, Retention(2)).sync()


class FailsAt:
    """A fault at operation number `at`; `once`, or from there on."""

    def __init__(self, at: int, error: BaseException, once: bool = False) -> None:
        self._left, self._error, self._once, self.has_failed = at, error, once, False

    def __call__(self, operation: str, path: str) -> None:
        self._left -= 1
        if self._left == 0 or (self._left < 0 and not self._once):
            self.has_failed = True
            raise self._error


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "an error"])
def test_a_failure_leaves_whole_files(run: Path, url: str, remote: Path, tmp_path: Path, is_killed: bool) -> None:
    save(run, 1)
    sync(run, url)
    older = remote.rename(tmp_path / "older")
    replace_file(run / "metrics.jsonl", b'{"update": 1}\n' * 9)
    for update in (1, 2, 3):
        save(run, update, numbers=5)
    for operation in range(1, 1000, 1 if is_killed else 3):
        shutil.copytree(str(older), str(remote))
        fault = FailsAt(operation, Killed() if is_killed else ConnectionError("lost"), once=not is_killed)
        with faults(fault), contextlib.suppress(Killed, ConnectionError):
            sync(run, url)
        copy = tmp_path / f"copy-{operation}"
        names = whole_checkpoints(url, "a run", copy)
        _, messages = RemoteRun(f"{url}/a run", "").fetch_files(copy, lambda name: True)
        assert not messages, f"operation {operation}"
        if not fault.has_failed:
            break
        sync(run, url)
        assert whole_checkpoints(url, "a run", tmp_path / f"again-{operation}") == [name_of(2), name_of(3)]
        shutil.rmtree(str(remote))
    assert names == [name_of(2), name_of(3)]
    assert operation > 40


def test_a_mirror_repeats_what_has_failed_and_reports_failures_in_a_row(run: Path, url: str, tmp_path: Path) -> None:
    save(run, 1)
    failing, written = [0], []

    def fault(operation: str, path: str) -> None:
        written.extend([path] * (operation == "close"))
        if failing[0] and operation == "half" and "manifest" in path:
            failing[0] -= 1
            raise ConnectionError("lost")

    def fail() -> str:
        failing[0] = 3
        return save(run, 2)

    def failed(times: int, error: str) -> None:
        found = mirror_record.read(run)
        assert (found.failures, found.error, found.last_error) == (times, error, "ConnectionError: lost")
        assert found.pending == (name_of(2),)

    lost = "ConnectionError: lost"
    script = Script(fail, lambda: failed(1, ""), lambda: failed(2, lost), lambda: failed(3, lost), lambda: None)
    with faults(fault) as connected:
        found = mirror(run, url, script=script)
    assert (found.is_complete, found.failures, found.error, found.checkpoints) == (True, 3, "", 2)
    assert len(connected) == 1 + 3
    assert len([path for path in written if "2/weights" in path]) == 1, "a verified file is not uploaded again"
    first_s, *retries_s, last_s = script.waits_s
    assert [wait_s <= most_s for wait_s, most_s in zip(retries_s, (1.0, 2.0, 4.0))] == [True] * 3
    assert (first_s, last_s) == (10.0, pytest.approx(max(10.0, sum(retries_s) / 0.05)))
    assert verified(url, "a run", tmp_path / "copy") == [name_of(1), name_of(2)]


def test_a_storage_that_never_answers_is_reported_at_once(run: Path, url: str) -> None:
    def fault(operation: str, path: str) -> None:
        raise PermissionError(13, "denied")

    def end() -> None:
        raise Killed

    seen: List[mirror_record.MirrorRecord] = []
    script = Script(*[lambda: seen.append(mirror_record.read(run))] * 3, end)
    with faults(fault), pytest.raises(Killed):
        mirror(run, url, script=script)
    assert [each.failures for each in seen] == [1, 2, 3]
    assert {(each.error, each.place) for each in seen} == {("PermissionError: [Errno 13] denied", "")}
    assert seen[0].pending[:2] == ("config.yaml", "metrics.jsonl")


def test_a_full_storage_keeps_the_older_checkpoint_until_the_newer_fits(run: Path, url: str, tmp_path: Path) -> None:
    save(run, 1)

    def fault(operation: str, path: str) -> None:
        if operation == "half" and Path(path).stat().st_size > 500_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def looked() -> None:
        assert "No space left" in mirror_record.read(run).last_error
        assert whole_checkpoints(url, "a run", tmp_path / f"copy-{len(list(tmp_path.iterdir()))}") == [name_of(1)]

    def make_room() -> str:
        looked()
        shutil.rmtree(str(run / "checkpoints" / name_of(2)))
        return save(run, 3)

    with faults(fault):
        found = mirror(run, url, lambda: save(run, 2, LARGE), looked, make_room, lambda: None, kept=Retention(1))
    assert (found.failures, found.is_complete) == (2, True)
    assert verified(url, "a run", tmp_path / "copy") == [name_of(3)]
