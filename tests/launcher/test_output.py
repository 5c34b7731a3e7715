"""Tags, whole lines and progress bars, byte for byte."""

from __future__ import annotations

import os
import pty
import select
from typing import Iterator, List, Tuple

import pytest

from raypod.launcher import output as module
from raypod.launcher.output import Console
from raypod.launcher.records import STDERR, STDOUT


class Screen:
    """A console whose two descriptors are read back."""

    def __init__(self, terminal: bool) -> None:
        self.ends: List[Tuple[int, int]] = [pty.openpty() if terminal else os.pipe() for _ in range(2)]
        self.patience_s = 0.05 if terminal else 0.0  # the kernel hands a terminal's bytes on when it finds time
        self.console = Console(self.ends[0][1], self.ends[1][1])

    def __call__(self, *pieces: Tuple[int, int, bytes]) -> bytes:
        for piece in pieces:
            self.console.add(*piece)
        self.console.flush()
        return self.read()

    def read(self) -> bytes:
        found = b""
        for end, _ in self.ends:
            while select.select([end], [], [], self.patience_s)[0]:
                found += os.read(end, 1 << 16)
        return found.replace(b"\r\n", b"\n")  # a terminal's own line ends

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


def test_every_line_has_its_tag(file: Screen) -> None:
    assert file((0, STDOUT, b"a\nb\n")) == b"[1,0]<stdout>:a\n[1,0]<stdout>:b\n"
    assert file((3, STDERR, b"\n")) == b"[1,3]<stderr>:\n"


def test_lines_are_never_torn_by_others(file: Screen) -> None:
    assert file((0, STDOUT, b"one "), (1, STDOUT, b"two\n"), (0, STDERR, b"x")) == b"[1,1]<stdout>:two\n"
    assert file((0, STDOUT, b"line\nrest")) == b"[1,0]<stdout>:one line\n"
    assert file.close() == b"[1,0]<stdout>:rest\n[1,0]<stderr>:x\n"


def test_bytes_pass_unchanged(file: Screen) -> None:
    data = bytes(range(256)) * 3 + b"\r\n"
    shown = file((0, STDOUT, data + b"end\n"))
    file.console.close()
    assert shown.replace(b"[1,0]<stdout>:", b"") == data.replace(b"\r\n", b"\n") + b"end\n"


def test_line_ends_of_another_system_stay(file: Screen) -> None:
    file.console.add(0, STDOUT, b"a\r")
    file.console.add(0, STDOUT, b"\nb\r\n")
    file.console.flush()
    assert os.read(file.ends[0][0], 100) == b"[1,0]<stdout>:a\r\n[1,0]<stdout>:b\r\n"


def test_a_bar_becomes_one_plain_line_in_a_file(file: Screen) -> None:
    states = [b"\r 0% |   ", b"\r 50% | #  ", b"\r100% |## "]
    assert all(file((0, STDERR, state)) == b"" for state in states)
    assert file((0, STDERR, b"\n")) == b"[1,0]<stderr>:100% |##\n"


def test_a_long_bar_in_a_file_gives_signs_of_life(file: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LIFE_SIGN_S", 0.0)
    assert file((0, STDERR, b"\r10%")) == b""
    assert file((0, STDERR, b"\r20%")) == b"[1,0]<stderr>:20%\n"
    assert file((1, STDERR, b"\r30%")) == b"[1,0]<stderr>:20%\n"


def test_the_bar_of_instance_0_is_drawn_in_place(terminal: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REDRAW_S", 0.0)
    erase = b"\r\x1b[K"
    assert terminal((0, STDERR, b"\r 1%")) == erase + b"[1,0]<stderr>: 1%"
    assert terminal((1, STDERR, b"\r 7%")) == b""  # of no other instance
    assert terminal((1, STDOUT, b"hello\n")) == b"[1,1]<stdout>:hello\n" + 2 * erase + b"[1,0]<stderr>: 1%"
    assert terminal((0, STDERR, b"\r100%\n")) == erase + b"[1,0]<stderr>:100%\n"


def test_a_bar_below_another_is_drawn_in_place(terminal: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REDRAW_S", 0.0)
    erase, up = b"\r\x1b[K", b"\x1b[A"
    terminal((0, STDERR, b"\repochs 0%"))
    assert terminal((0, STDERR, b"\n\rsteps 0%" + up)).endswith(b"epochs 0%\n" + erase + b"[1,0]<stderr>:steps 0%")
    assert terminal((0, STDERR, b"\n\rsteps 1%" + up)) == erase + b"[1,0]<stderr>:steps 1%"
    assert terminal((0, STDERR, b"\n\r        " + up + b"\repochs 9%")) == erase + b"[1,0]<stderr>:epochs 9%"


def test_a_bar_below_another_leaves_no_escapes_in_a_file(file: Screen) -> None:
    assert file((0, STDERR, b"\repochs 0%\n\rsteps 0%\x1b[A\n\rsteps 1%\x1b[A")) == b"[1,0]<stderr>:epochs 0%\n"
    assert file((0, STDERR, b"\rsteps 2%\n")) == b"[1,0]<stderr>:steps 2%\n"


def test_a_question_without_a_line_end_is_seen_on_a_terminal(terminal: Screen) -> None:
    assert terminal((0, STDOUT, b"Name? ")).endswith(b"[1,0]<stdout>:Name? ")


def test_an_endless_line_goes_on_as_another(file: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_LINE_BYTES", 10)
    assert file((0, STDOUT, b"0123456789ab")) == b"[1,0]<stdout>:0123456789ab\n"
    assert file((0, STDOUT, b"c\n")) == b"[1,0]<stdout>:c\n"
