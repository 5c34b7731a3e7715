"""Files and folders that survive faults, logs with their marks and last lines, and what a storage holds."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest

from raypod.errors import WaitTimedOut
from raypod.observe.status.launch_status import LaunchFile
from raypod.observe.trackers.companions import TrackerRecord
from raypod.runs import run_state
from raypod.runs.run_view import RunView
from raypod.runs.upload.mirror_record import MirrorRecord
from raypod.system import companion, files, log_files
from raypod.system.files import create_folder, create_numbered_folder, remove_empty
from raypod.system.log_files import LastLine, LogTimes, Mark, offset_at, read_marks, time_of, times_file
from raypod.system.private import make_private
from raypod.system.remote.errors import StorageError
from raypod.system.remote.store import Digests, Store, checksum_in
from tests.support.faulty_disks import FlushedFiles
from tests.support.faulty_runs import plan_for
from tests.support.mirrored_runs import faults


def test_a_created_folder_survives_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = FlushedFiles(monkeypatch)
    created = create_numbered_folder(tmp_path / "runs" / "run")
    files.make_folder(created[-1] / "checkpoints")
    assert [path for path in (*created, created[-1] / "checkpoints") if flushed.size_of(path.parent) is None] == []


def test_a_replaced_file_has_its_new_content_and_leaves_nothing_else(tmp_path: Path) -> None:
    files.replace_file(tmp_path / "file", b"old")
    (tmp_path / "file.partial").write_bytes(b"of a killed process")
    files.replace_file(tmp_path / "file", b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"new"]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_large_file_is_flushed_while_it_is_written(tmp_path: Path, monkeypatch: Any, is_known: bool) -> None:
    ranges = []

    def flush(descriptor: int, first: int, count: int, flags: int) -> None:
        assert os.fstat(descriptor).st_size == first + count
        ranges.append((first, count))

    monkeypatch.setattr(files, "_CHUNK_BYTES", 8)
    monkeypatch.setattr(files, "_sync_file_range", flush if is_known else None)
    with files.new_file(tmp_path / "file") as file:
        for part in (b"abcde", b"fgh", b"ijklmnopqrstuvwxyz", b"", b"0"):
            file.write(part)
    assert (tmp_path / "file").read_bytes() == b"abcdefghijklmnopqrstuvwxyz0"
    assert ranges == ([(0, 8), (8, 8), (16, 8)] if is_known else [])


class FailingDisk:
    """A disk whose next operations of a kind fail with an error, and lose what was not flushed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, operation: str, *errors: int) -> None:
        self.path, self.errors, self.flushed = path, list(errors), b""
        self._operation, self._real = operation, getattr(os, operation)
        monkeypatch.setattr(os, operation, self._fail_or_do)

    def _fail_or_do(self, *arguments: Any) -> Any:
        if self.errors:
            if self._operation == "fsync":  # as NFS does: what the server did not take is no longer in the file
                os.truncate(str(self.path), len(self.flushed))
            number = self.errors.pop(0)
            raise OSError(number, os.strerror(number))
        done = self._real(*arguments)
        self.flushed = self.path.read_bytes()
        return done


@pytest.mark.parametrize("operation", ["write", "fsync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_error_costs_one_warning(tmp_path: Path, monkeypatch: Any, operation: str, number: int) -> None:
    path, warnings = tmp_path / "lines", []  # type: ignore[var-annotated]
    path.write_bytes(b"before\n")
    file = files.AppendOnlyFile(path, warnings.append)
    with monkeypatch.context() as patched:
        disk = FailingDisk(patched, path, operation)
        disk.flushed = b"before\n"
        for count, line in enumerate(("first", "second", "third"), start=1):
            disk.errors = [number] * 2 * (count < 3)
            file.write_line(line)
            file.sync()
        assert path.read_bytes() == b"before\nfirst\nsecond\nthird\n"
        disk.errors = [number] * 2
        file.write_line("last")
        file.close()
    assert path.read_bytes() == b"before\nfirst\nsecond\nthird\nlast\n"
    warning = f"cannot write {path} ({os.strerror(number)}); the run continues, and its lines are written later"
    assert warnings == [warning] * 2


def test_an_append_only_file_that_cannot_be_written_at_its_end_is_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    file = files.AppendOnlyFile(tmp_path / "lines")
    FailingDisk(monkeypatch, file.path, "write", *[errno.EIO] * 9)
    file.write_line("lost")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        file.close()


def test_a_flush_that_fails_removes_nothing_that_another_process_has_written(tmp_path: Path, monkeypatch: Any) -> None:
    file = files.AppendOnlyFile(tmp_path / "lines")
    file.write_line("own")
    with file.path.open("a") as other:
        other.write("of another process\n")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.EIO, "error")))
    file.sync()
    assert file.path.read_text() == "own\nof another process\n"


def test_lines_are_flushed_before_they_need_much_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushes: List[int] = []
    monkeypatch.setattr(os, "fsync", flushes.append)
    file = files.AppendOnlyFile(tmp_path / "lines")
    for _ in range(9):
        file.write(bytes(1 << 20))
    assert len(flushes) == 2
    file.close()


def test_a_file_lock_excludes_others_until_it_is_released(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with files.file_lock(lock, 1.0, "run.x"), pytest.raises(WaitTimedOut, match=r"run\.x"):
        files.file_lock(lock, 0.01, "run.x").__enter__()
    with files.file_lock(tmp_path / "lock", 0.01, "run.x"):
        pass


def test_nan_and_infinity_are_null_in_json() -> None:
    content = {"loss": float("nan"), "values": (1.5, float("inf")), "text": "NaN"}
    assert json.loads(files.strict_json(content)) == {"loss": None, "values": [1.5, None], "text": "NaN"}


def at_once(action: Callable[[Path], Any], path: Path) -> List[Any]:
    """Return the results of 20 calls in parallel threads, without those that raised FileExistsError."""
    with ThreadPoolExecutor(20) as pool:
        calls = [pool.submit(action, path) for _ in range(20)]
    return [call.result() for call in calls if not isinstance(call.exception(), FileExistsError)]


def test_parallel_calls_create_different_folders_or_one(tmp_path: Path) -> None:
    created = at_once(create_numbered_folder, tmp_path / "runs" / "now-digits")
    names = {folders[-1].name for folders in created}
    assert names == {"now-digits", *(f"now-digits-{number}" for number in range(2, 21))}
    assert sum(tmp_path / "runs" in folders for folders in created) == 1  # one call created the parent
    assert len(at_once(create_folder, tmp_path / "a" / "b")) == 1


def test_a_parent_created_before_its_name_is_taken_belongs_to_the_folder(tmp_path: Path, monkeypatch: Any) -> None:
    runs, make = tmp_path / "runs", Path.mkdir

    def mkdir_after_another_process(path: Path, *arguments: Any) -> None:
        if path == runs / "now":
            make(path)
        make(path, *arguments)

    monkeypatch.setattr(Path, "mkdir", mkdir_after_another_process)
    assert create_numbered_folder(runs / "now") == [runs, runs / "now-2"]


def test_created_folders_are_removed_unless_they_have_other_files_and_a_file_is_no_folder(tmp_path: Path) -> None:
    created = create_folder(tmp_path / "a" / "b")
    (tmp_path / "a" / "precious").touch()
    remove_empty(created)
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "precious"]
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        create_folder(tmp_path / "file" / "folder")


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: None, ""),
        (lambda path: path.mkdir(0o700), ""),
        (lambda path: path.mkdir(0o755), "is open to other users (mode 0755): check what is in it, then chmod 700 it"),
        (lambda path: path.mkdir(0o710), "is open to other users (mode 0710)"),
        (lambda path: path.touch(), "is a file of uid"),
        (lambda path: path.symlink_to("."), "is a symbolic link of uid"),
    ],
)
def test_a_private_folder_is_one_that_only_this_user_can_use(
    tmp_path: Path, make: Callable[[Path], Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a" / "folder"
    path.parent.mkdir()
    make(path)
    assert make_private(str(path)).startswith(f"{path} {problem}" if problem else "")
    assert bool(problem) == bool(make_private(str(path)))
    if not problem:
        assert path.stat().st_mode & 0o777 == 0o700
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        assert make_private(str(path)) == f"{path} belongs to uid {path.stat().st_uid}, not to 12345: remove it"


def test_a_folder_that_others_can_rename_is_not_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    above, path = tmp_path / "above", tmp_path / "above" / "mine"
    above.mkdir()
    (tmp_path / "link").symlink_to(above)
    assert not make_private(str(path))
    above.chmod(0o777)
    for given in (path, tmp_path / "link" / "mine"):
        assert make_private(str(given)).startswith(f"{given} is in {above}, where every user can rename it")
    above.chmod(0o1777)
    assert not make_private(str(path))
    found, lstat = above.lstat(), os.lstat
    foreign = os.stat_result((*found[:4], 12345, *found[5:]))
    monkeypatch.setattr(os, "lstat", lambda each: foreign if each == str(above) else lstat(each))
    assert make_private(str(path)) == f"{path} is in {above}, which belongs to uid 12345: use another folder"


DEEP = ["[" * 101 + "]" * 101, '{"a": ' * 5_000 + "1" + "}" * 5_000, "[" * 100_000, "[" * 101]
FLAT = ["[" * 100 + "]" * 100, '["' + "[" * 500 + '"]', r'["\"' + "{" * 500 + '"]', f"[{'[], ' * 500}{{}}]"]


@pytest.mark.parametrize("text", [*DEEP, *FLAT])
def test_json_with_too_many_levels_is_no_json(text: str) -> None:
    """Brackets in strings and beside each other are no levels."""
    for content in (text, text.encode()):
        if text in FLAT:
            assert files.parse_json(content) == json.loads(text)
        else:
            with pytest.raises(ValueError, match="nested too deeply"):
                files.parse_json(content)


Write = Callable[[Path], Any]
FAIL: Dict[str, Write] = {
    "replace_file": lambda folder: files.replace_file(folder / "file", b""),
    "new_file": lambda folder: files.new_file(folder / "new").__enter__(),
    "make_folder": lambda folder: files.make_folder(folder / "logs"),
    "AppendOnlyFile": lambda folder: files.AppendOnlyFile(folder / "lines"),
    "file_lock": lambda folder: files.file_lock(folder / "lock", 1.0, "").__enter__(),
    "keep_beginning": lambda folder: files.keep_beginning(folder / "file", 1),
    "remove_folder": lambda folder: files.remove_folder(folder / "old"),
    "rename_folder": lambda folder: files.rename_folder(folder / "old", folder / "new"),
    "the log of a mirror": lambda folder: companion.start_module("os", [], folder / "storage.log"),
    "storage.json": lambda folder: companion.write_state(folder / "storage.json", MirrorRecord()),
    "a tracker's memory": lambda folder: companion.write_state(folder / "trackers" / "x.json", TrackerRecord()),
}


@pytest.mark.parametrize("name", FAIL)
def test_what_writes_fails_below_a_lost_mount_point(name: str, tmp_path: Path) -> None:
    folder, below = tmp_path / "run", {"file": b"abc", "old/file": b""}
    folder.mkdir()
    with files.held(folder):
        files.replace_file(folder / "file", b"here")
        folder.rename(tmp_path / "unmounted")
        (folder / "old").mkdir(parents=True)
        for path, content in below.items():
            (folder / path).write_bytes(content)
        with pytest.raises(OSError, match="not there any more") as caught:
            FAIL[name](folder)
        assert caught.value.errno == errno.ESTALE
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == below
    files.replace_file(folder / "file", b"released")


def test_states_of_runs_and_launches_and_times_of_logs_are_not_written_there(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(run_state, "_WRITE_INTERVAL_S", 0.0)
    folder, log = tmp_path / "run", tmp_path / "log"
    folder.mkdir()
    log.write_text("a line\n")
    times = LogTimes(folder / "log")
    state = run_state.StateFile(folder, RunView(plan_for(tmp_path)))
    with files.held(folder), state, LaunchFile(folder, ["true"], ["a"]):
        folder.rename(tmp_path / "unmounted")
        folder.mkdir()
        os.link(str(log), str(folder / "log"))
        times.mark()
    assert [path.name for path in folder.iterdir()] == ["log"]
    assert run_state.read(tmp_path / "unmounted") is not None


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "instance-0.log"


def test_marks_hold_the_sizes_of_the_log_some_time_apart(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(log_files.time, "monotonic", lambda: clock[0])
    times = LogTimes(log)
    times.mark()  # the log does not exist
    assert not times_file(log).exists()
    for step, size in enumerate((1, 2, 3, 4, 5, 5, 5, 5, 5, 6, 7, 8, 9)):
        log.write_bytes(b"x" * size)
        clock[0] = 100.0 + 0.5 * step
        times.mark()
    assert [mark.size_bytes for mark in read_marks(log)] == [1, 5, 9]  # none while it does not grow
    assert times_file(log).name == "instance-0.times"


def test_marks_that_cannot_be_written_or_read_are_left_out(log: Path) -> None:
    log.write_bytes(b"x")
    times_file(log).mkdir()
    LogTimes(log).mark()
    assert read_marks(log) == []
    times_file(log).rmdir()
    times_file(log).write_bytes(b"no mark\n5 10\n7 \n\xff 3\n9 4\n")  # the log was truncated between 5 and 9
    assert read_marks(log) == [Mark(9.0, 4)]


def test_offsets_and_times() -> None:
    marks = [Mark(10.0, 100), Mark(20.0, 200)]
    assert [offset_at(marks, at_s) for at_s in (9.0, 10.0, 15.0, 25.0)] == [0, 100, 100, 200]
    assert [time_of([100, 200], marks, offset) for offset in (1, 100, 101, 200, 201)] == [10.0, 10.0, 20.0, 20.0, None]
    assert (offset_at([], 5.0), time_of([], [], 5)) == (0, None)


def test_the_last_line_of_a_log_is_of_this_process_and_not_blank(log: Path) -> None:
    last = LastLine(log)
    assert last.read() is None  # there is no file
    for content, line in (
        (b"begun\n  half of", "half of"),  # without its end
        (b"begun\n  half of it\n 10%\r 20%\r", "20%"),
        (b"a" * 100_000 + b"\n", "a" * 500),
        (b"\xff short\n", "\ufffd short"),  # truncated before
        (b"", None),
        (b"one\n", "one"),
    ):
        log.write_bytes(content)
        assert last.read() == line
    log.unlink()
    assert last.read() is None
    log.write_text("RuntimeError: of the process before\n")
    last = LastLine(log)
    assert last.read() is None
    with log.open("a") as file:
        file.write("one\ntwo\n\n  \n")
    assert (last.read(), last.read()) == ("two", "two")
    with log.open("a") as file:
        file.write("\n" * 10_000)
    assert last.read() == "two"
    last.forget()
    assert last.read() is None


def test_an_upload_is_read_back_where_the_storage_has_no_checksum(tmp_path: Path) -> None:
    def garble(operation: str, path: str) -> None:
        if operation == "close":
            Path(path).write_bytes(b"garbled")

    with faults(garble), pytest.raises(StorageError, match="another content on the storage"):
        Store(f"file://{tmp_path}/remote").write_bytes("name", b"1234567")


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 20, 25])
def test_checksums_of_objects(size: int) -> None:
    data = bytes(range(size))
    digests = Digests(10)
    for first in range(0, size, 3):
        digests.add(data[first : first + 3])
    whole = hashlib.md5(data)
    parts = [hashlib.md5(data[first : first + 10]).digest() for first in range(0, size, 10)]
    combined = f"{hashlib.md5(b''.join(parts)).hexdigest()}-{len(parts)}"
    assert checksum_in({"ETag": f'"{whole.hexdigest().upper()}"'}) in digests.checksums
    assert checksum_in({"md5Hash": base64.b64encode(whole.digest()).decode()}) in digests.checksums
    assert checksum_in({"ETag": f'"{combined}"'}) in digests.checksums
    assert checksum_in({"ETag": '"0-1"'}) not in digests.checksums
    assert checksum_in({"size": 1}) is None
    assert digests.sha256 == hashlib.sha256(data).hexdigest()
