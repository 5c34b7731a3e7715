"""Buffers get the bytes of the file, whatever their sizes are and however many bytes one system call reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, List

import pytest

from raypod.checkpoint import scattered_read
from raypod.checkpoint.scattered_read import read_into

SIZES = [[], [5], [0, 3, 0], [1] * 40, [30, 7, 16, 16, 1], [100]]


def read(path: Path, offset: int, sizes: List[int]) -> bytes:
    buffers = [memoryview(bytearray(size)) for size in sizes]
    with path.open("rb") as file:
        read_into(file.fileno(), offset, buffers)
    return b"".join(buffers)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(bytes(range(256)))
    return tmp_path / "file"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("most", [None, 3])
def test_buffers_of_any_size_are_filled(path: Path, monkeypatch: pytest.MonkeyPatch, sizes: Any, most: Any) -> None:
    monkeypatch.setattr(scattered_read, "_GROUP_BYTES", 16)
    monkeypatch.setattr(scattered_read, "_GROUP_BUFFERS", 4)
    real, calls = os.preadv, []

    def preadv(descriptor: int, buffers: List[memoryview], offset: int) -> int:
        calls.append(len(buffers))
        return real(descriptor, buffers if most is None else [buffers[0][:most]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert read(path, 10, sizes) == bytes(range(10, 10 + sum(sizes)))
    assert max(calls, default=0) <= 4


def test_a_file_that_ends_before_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for group_bytes in (16, 1000):
        monkeypatch.setattr(scattered_read, "_GROUP_BYTES", group_bytes)
        with pytest.raises(EOFError):
            read(path, 10, [200, 47])
