from __future__ import annotations

from typing import NoReturn

import pytest

from raypod.cli import FlagParser, counted, format_table, nearest, report_errors, suggestion
from raypod.errors import ConfigError, RunError

ROWS = [("host", "IPUs"), ("a", "0..15"), ("long-name", "16")]


@pytest.mark.parametrize(("error", "code"), [(ConfigError("no"), 2), (RunError("no"), 1), (KeyboardInterrupt(), 130)])
def test_an_error_is_one_line_and_an_exit_code(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> NoReturn:
        raise error

    assert report_errors(command) == code
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_wrong_flag_is_a_config_error() -> None:
    parser = FlagParser(prog="test")
    parser.add_argument("--count", type=int)
    with pytest.raises(ConfigError, match=r"--count: invalid int value: 'x' \(test --help lists all flags\)"):
        parser.parse_args(["--count", "x"])


def test_similar_names_are_suggested() -> None:
    assert nearest("spead", ["spread", "speed", "other"], count=2) == ["spread", "speed"]
    assert suggestion("spead", ["speed", "other"]) == "; did you mean speed?"
    assert suggestion("zzz", ["speed", "other"]) == "; known: speed, other"


def test_a_noun_is_plural_unless_there_is_one() -> None:
    assert [counted(number, "host") for number in (0, 1, 2)] == ["0 hosts", "1 host", "2 hosts"]


def test_a_table_has_aligned_columns() -> None:
    assert format_table(ROWS) == ["host       IPUs", "a          0..15", "long-name  16"]
    assert format_table(ROWS[:2], least_widths=(6,), separator=" ") == ["host   IPUs", "a      0..15"]


def test_the_last_column_of_a_table_is_folded_to_the_width_of_a_terminal() -> None:
    rows = [
        ("a", "b", "one two three four five"),
        ("aa", "bb", "/a/path/that-is-longer-than-the/terminal"),
        ("", "", ""),
    ]
    assert format_table(rows, width=28) == [
        "a   b   one two three four",
        "        five",
        "aa  bb  /a/path/that-is-longer-than-the/terminal",
        "",
    ]
    assert format_table(rows, width=1) == format_table(rows, width=28)  # no column is narrower than a few words
    assert format_table(rows) == format_table(rows, width=80)


def test_a_boxed_table() -> None:
    assert format_table(ROWS[:2], boxed=True) == [
        "+------+-------+",
        "| host | IPUs  |",
        "+------+-------+",
        "| a    | 0..15 |",
        "+------+-------+",
    ]
