from __future__ import annotations

from pathlib import Path

import pytest

from raypod.host import log_times
from raypod.host.log_times import LogTimes, Mark, offset_at, read_marks, time_of, times_file


def test_a_mark_holds_the_size_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "instance-0.log"
    times = LogTimes(log)
    times.mark()  # the log does not exist
    assert not times_file(log).exists()
    monkeypatch.setattr(log_times, "_INTERVAL_S", 0.0)
    log.write_bytes(b"one\n")
    times.mark()
    times.mark()  # the log has not grown
    log.write_bytes(b"one\ntwo\n")
    times.mark()
    assert [mark.size_bytes for mark in read_marks(log)] == [4, 8]
    assert times_file(log).name == "instance-0.times"


def test_marks_are_some_time_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(log_times.time, "monotonic", lambda: clock[0])
    log = tmp_path / "a.log"
    times = LogTimes(log)
    for step in range(9):
        log.write_bytes(b"x" * (step + 1))
        clock[0] = 100.0 + 0.5 * step
        times.mark()
    assert [mark.size_bytes for mark in read_marks(log)] == [1, 5, 9]


def test_marks_that_cannot_be_written_or_read_are_left_out(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
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
