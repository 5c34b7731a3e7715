"""Nothing is written by a path that leads elsewhere than when its folder was opened, as after `umount -l`."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, Callable, Dict

import pytest

from raypod.observe.status.launch_status import LaunchFile
from raypod.observe.trackers.companions import TrackerRecord
from raypod.runs import run_state
from raypod.runs.run_view import RunView
from raypod.runs.upload.mirror_record import MirrorRecord
from raypod.system import companion, files
from raypod.system.log_files import LogTimes
from tests.support.faulty_runs import plan_for

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


def test_the_states_of_runs_and_launches_and_the_times_of_logs_are_not_written_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
