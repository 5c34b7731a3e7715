"""Tests of runtime/launcher/output: tags, complete lines and progress bars, byte for byte."""

from __future__ import annotations

import os
import pty
import select
from pathlib import Path
from typing import Iterator, List, Tuple

import pytest

from raypod.runtime.launcher import output as module
from raypod.runtime.launcher.output import Console, Output
from raypod.runtime.launcher.records import STDERR, STDOUT


class Screen:
    """A console, and the reading ends of its two descriptors."""

    def __init__(self, terminal: bool) -> None:
        self.ends: List[Tuple[int, int]] = [pty.openpty() if terminal else os.pipe() for _ in range(2)]
        self.wait_s = 0.05 if terminal else 0.0  # a terminal's bytes arrive with a delay
        self.console = Console(self.ends[0][1], self.ends[1][1])

    def __call__(self, *pieces: Tuple[int, int, bytes]) -> bytes:
        for piece in pieces:
            self.console.add(*piece)
        self.console.flush()
        return self.read()

    def read(self) -> bytes:
        found = b""
        for end, _ in self.ends:
            while select.select([end], [], [], self.wait_s)[0]:
                found += os.read(end, 1 << 16)
        return found.replace(b"\r\n", b"\n")  # line endings of a terminal

    def close(self) -> bytes:
        self.console.close()
        return self.read()


def screen(terminal: bool) -> Iterator[Screen]:
    made = Screen(terminal)
    yield made
    for pair in made.ends:
        for end in pair:
            os.close(end)


@pytest.fixture
def file() -> Iterator[Screen]:
    yield from screen(terminal=False)


@pytest.fixture
def terminal() -> Iterator[Screen]:
    yield from screen(terminal=True)


def test_every_line_has_a_tag_and_sources_never_mix(file: Screen) -> None:
    assert file((0, STDOUT, b"a\nb\n")) == b"[1,0]<stdout>:a\n[1,0]<stdout>:b\n"
    assert file((3, STDERR, b"\n")) == b"[1,3]<stderr>:\n"
    assert file((0, STDOUT, b"one "), (1, STDOUT, b"two\n"), (0, STDERR, b"x")) == b"[1,1]<stdout>:two\n"
    assert file((0, STDOUT, b"line\nrest")) == b"[1,0]<stdout>:one line\n"
    assert file.close() == b"[1,0]<stdout>:rest\n[1,0]<stderr>:x\n"


def test_bytes_are_unchanged(file: Screen) -> None:
    data = bytes(range(256)) * 3 + b"\r\n"
    shown = file((0, STDOUT, data + b"end\n"))
    file.console.close()
    assert shown.replace(b"[1,0]<stdout>:", b"") == data.replace(b"\r\n", b"\n") + b"end\n"


def test_crlf_line_endings_are_kept(file: Screen) -> None:
    file.console.add(0, STDOUT, b"a\r")
    file.console.add(0, STDOUT, b"\nb\r\n")
    file.console.flush()
    assert os.read(file.ends[0][0], 100) == b"[1,0]<stdout>:a\r\n[1,0]<stdout>:b\r\n"


def test_a_progress_bar_becomes_one_plain_line_in_a_file(file: Screen) -> None:
    states = [b"\r 0% |   ", b"\r 50% | #  ", b"\r100% |## "]
    assert all(file((0, STDERR, state)) == b"" for state in states)
    assert file((0, STDERR, b"\n")) == b"[1,0]<stderr>:100% |##\n"
    nested = b"\repochs 0%\n\rsteps 0%\x1b[A\n\rsteps 1%\x1b[A"  # leaves no escape sequences
    assert file((0, STDERR, nested)) == b"[1,0]<stderr>:epochs 0%\n"
    assert file((0, STDERR, b"\rsteps 2%\n")) == b"[1,0]<stderr>:steps 2%\n"


def test_a_long_running_bar_prints_its_state_in_a_file(file: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BAR_STATE_S", 0.0)
    assert file((0, STDERR, b"\r10%")) == b""
    assert file((0, STDERR, b"\r20%")) == b"[1,0]<stderr>:20%\n"
    assert file((1, STDERR, b"\r30%")) == b"[1,0]<stderr>:20%\n"


def test_the_bar_of_instance_0_is_drawn_in_place(terminal: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REDRAW_S", 0.0)
    erase = b"\r\x1b[K"
    assert terminal((0, STDERR, b"\r 1%")) == erase + b"[1,0]<stderr>: 1%"
    assert terminal((1, STDERR, b"\r 7%")) == b""  # only the bar of instance 0 is drawn
    assert terminal((1, STDOUT, b"hello\n")) == b"[1,1]<stdout>:hello\n" + 2 * erase + b"[1,0]<stderr>: 1%"
    assert terminal((0, STDERR, b"\r100%\n")) == erase + b"[1,0]<stderr>:100%\n"


def test_a_nested_bar_is_drawn_in_place(terminal: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REDRAW_S", 0.0)
    erase, up = b"\r\x1b[K", b"\x1b[A"
    terminal((0, STDERR, b"\repochs 0%"))
    assert terminal((0, STDERR, b"\n\rsteps 0%" + up)).endswith(b"epochs 0%\n" + erase + b"[1,0]<stderr>:steps 0%")
    assert terminal((0, STDERR, b"\n\rsteps 1%" + up)) == erase + b"[1,0]<stderr>:steps 1%"
    assert terminal((0, STDERR, b"\n\r        " + up + b"\repochs 9%")) == erase + b"[1,0]<stderr>:epochs 9%"


def test_a_prompt_without_newline_is_shown_on_a_terminal(terminal: Screen) -> None:
    assert terminal((0, STDOUT, b"Name? ")).endswith(b"[1,0]<stdout>:Name? ")


def test_a_line_that_is_too_long_is_split(file: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_LINE_BYTES", 10)
    assert file((0, STDOUT, b"0123456789ab")) == b"[1,0]<stdout>:0123456789ab\n"
    assert file((0, STDOUT, b"c\n")) == b"[1,0]<stdout>:c\n"


def test_flushed_lines_of_a_program_are_on_the_console_and_in_its_log(file: Screen, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    output = Output(str(tmp_path), 1, file.console)
    output.add(0, STDOUT, b"loss 0.5\nnot yet")
    output.flush()
    assert b"loss 0.5" in file.read()
    assert Path(output.log_file(0)).read_bytes() == b"loss 0.5\nnot yet"
    output.close()
