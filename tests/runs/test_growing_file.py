from __future__ import annotations

import math
from pathlib import Path

import pytest

from raypod.runs import growing_file
from raypod.runs.growing_file import GrowingFile, last_lines


def test_only_complete_new_lines_are_returned(tmp_path: Path) -> None:
    path = tmp_path / "file"
    growing = GrowingFile(path)
    assert growing.read() == ([], False)
    path.write_bytes(b"one\ntw")
    assert growing.read() == ([b"one"], False)
    assert growing.read() == ([], False)
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert growing.read() == ([b"two", b"three"], False)


def test_a_replaced_or_truncated_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\ntwo\n")
    growing = GrowingFile(path)
    growing.read()
    (tmp_path / "new").write_bytes(b"1\n2\n3\n4\n5\n6\n")
    (tmp_path / "new").replace(path)
    assert growing.read() == ([b"1", b"2", b"3", b"4", b"5", b"6"], True)
    path.write_bytes(b"x\n")
    assert growing.read() == ([b"x"], True)


def test_records_skip_damaged_lines_and_read_null_as_nan(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b'{"a": 1}\n[2]\n{"a": \n{"a": null}\n')
    first, second = GrowingFile(path).read_records().records
    assert first == {"a": 1}
    assert math.isnan(second["a"])


def test_a_read_is_bounded_and_a_longer_line_is_returned_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a\nb\r c\n" + b"x" * 9 + b"\nend")
    growing = GrowingFile(path, max_bytes=8)
    assert [growing.read().lines for _ in range(4)] == [[b"a", b"b\r c"], [b"x" * 8], [b"x"], []]
    assert growing.read_rest() == b"end"


@pytest.mark.parametrize("content", [b"", b"a", b"\n", b"\n\na", b"one\ntwo\n", b"one\n\nthree", b"long line\nx\n" * 9])
@pytest.mark.parametrize("tail_bytes", [1, 3, 64])
def test_last_lines_are_those_of_the_file_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, tail_bytes: int
) -> None:
    monkeypatch.setattr(growing_file, "_TAIL_BYTES", tail_bytes)
    path = tmp_path / "lines"
    assert list(last_lines(path)) == []
    path.write_bytes(content)
    found = list(last_lines(path))
    assert [line.text for line in reversed(found)] == content.splitlines(keepends=True)
    assert all(content[: line.end].endswith(line.text) for line in found)


def test_last_lines_read_only_the_end_of_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with path.open("wb") as file:
        file.truncate(1 << 36)  # a hole of 64 GiB
        file.seek(0, 2)
        file.write(b"\nfirst\nlast\n")
    lines = last_lines(path)
    assert [next(lines).text, next(lines).text] == [b"last\n", b"first\n"]
