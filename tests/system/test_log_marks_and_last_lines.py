"""The times and the last lines of the logs of instances."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypod.system import log_files
from raypod.system.log_files import LastLine, LogTimes, Mark, offset_at, read_marks, time_of, times_file


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


def test_lines_of_an_earlier_process_and_blank_lines_do_not_count(log: Path) -> None:
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


def test_the_last_line_of_a_log(log: Path) -> None:
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
