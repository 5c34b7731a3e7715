from __future__ import annotations

import datetime
import os
import time
from pathlib import Path

import pytest

from raypod.errors import ConfigError
from raypod.observe.logs.sources import offset_of_tail, offset_since, parse_since
from raypod.system.log_files import Mark


@pytest.mark.parametrize(("text", "age_s"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("2d", 172800), ("0s", 0)])
def test_an_age_counts_from_now(text: str, age_s: float) -> None:
    before_s = time.time()
    assert before_s - age_s <= parse_since(text) <= time.time() - age_s


def test_a_time_is_iso_or_unix() -> None:
    local = datetime.datetime(2026, 1, 31, 8, 0)
    assert parse_since("2026-01-31T08:00") == parse_since("2026-01-31 08:00:00") == local.timestamp()
    assert parse_since("2026-01-31T08:00:00Z") == parse_since("2026-01-31T09:00:00+01:00") == 1769846400.0
    assert parse_since("1769846400.5") == 1769846400.5


@pytest.mark.parametrize("text", ["", "ten", "-5", "10 m", "5w", "nan", "inf", "2026-13-01", "08:00"])
def test_anything_else_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="--since .*must be an age"):
        parse_since(text)


@pytest.mark.parametrize("content", [b"", b"\n", b"one", b"one\n", b"one\ntwo\n\nfour", b"a\nb\nc\n", b"x\n" * 70000])
@pytest.mark.parametrize("lines", [0, 1, 2, 3, 4, 65537, 100000])
def test_the_tail_is_the_last_lines(tmp_path: Path, content: bytes, lines: int) -> None:
    log = tmp_path / "log"
    log.write_bytes(content)
    expected = b"".join(content.splitlines(keepends=True)[-lines:]) if lines else b""
    assert content[offset_of_tail(log, lines) :] == expected


def test_output_since_a_time_begins_with_a_whole_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\ntwo\nthree\n")
    os.utime(log, (100.0, 100.0))
    marks = [Mark(10.0, 4), Mark(20.0, 6)]  # the second one is within a line
    assert [offset_since(log, marks, at_s) for at_s in (5.0, 10.0, 20.0, 100.0)] == [0, 4, 4, 4]
    assert offset_since(log, marks, 100.5) == 14  # the file is older
    assert offset_since(log, [], 50.0) == 0
