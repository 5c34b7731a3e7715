"""Files are replaced atomically, append-only files survive a full disk, and JSON has no NaN."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from raypod.errors import WaitTimedOut
from raypod.host import files


def test_a_replaced_file_has_its_new_content_and_leaves_nothing_else(tmp_path: Path) -> None:
    files.replace_file(tmp_path / "file", b"old")
    (tmp_path / "file.partial").write_bytes(b"of a killed process")
    files.replace_file(tmp_path / "file", b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"new"]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_large_file_is_flushed_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
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


def test_an_append_only_file_keeps_lines_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = files.AppendOnlyFile(tmp_path / "lines")
    file.write_line("first")
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", fail)
        file.write_line("second")
        file.sync()
    assert file.path.read_text() == "first\n"
    file.write_line("third")
    assert file.path.read_text() == "first\nsecond\nthird\n"
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
