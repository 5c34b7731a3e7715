from __future__ import annotations

from pathlib import Path

from raypod.host.last_line import LastLine


def test_lines_of_an_earlier_process_do_not_count(tmp_path: Path) -> None:
    log = tmp_path / "instance-0.log"
    log.write_text("RuntimeError: of the process before\n")
    last = LastLine(log)
    assert last.read() is None
    with log.open("a") as file:
        file.write("one\ntwo\n\n  \n")
    assert last.read() == "two"
    assert last.read() == "two"
    last.forget()
    assert last.read() is None


def test_a_line_without_its_end_and_a_progress_bar(tmp_path: Path) -> None:
    log = tmp_path / "instance-0.log"
    last = LastLine(log)
    assert last.read() is None  # there is no file
    log.write_bytes(b"begun\n  half of")
    assert last.read() == "half of"
    log.write_bytes(b"begun\n  half of it\n 10%\r 20%\r")
    assert last.read() == "20%"


def test_a_truncated_log_a_long_line_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    log = tmp_path / "instance-0.log"
    last = LastLine(log)
    log.write_bytes(b"a" * 100_000 + b"\n")
    assert last.read() == "a" * 500
    log.write_bytes(b"\xff short\n")
    assert last.read() == "\ufffd short"
    log.write_bytes(b"")
    assert last.read() is None


def test_blank_lines_do_not_replace_the_last_line(tmp_path: Path) -> None:
    log = tmp_path / "instance-0.log"
    last = LastLine(log)
    log.write_text("the last one\n")
    assert last.read() == "the last one"
    log.write_text("the last one\n" + "\n" * 10_000)
    assert last.read() == "the last one"


def test_a_log_that_disappears_has_no_line(tmp_path: Path) -> None:
    log = tmp_path / "instance-0.log"
    last = LastLine(log)
    log.write_text("one\n")
    assert last.read() == "one"
    log.unlink()
    assert last.read() is None
