from __future__ import annotations

import math

from raypod.observe.monitor import style


def test_durations_and_numbers() -> None:
    seconds = (None, math.inf, 0.0, 0.9996, 59.96, 187.0, 7387.0, 273600.0, -1.0)
    texts = ["-", "-", "0 ms", "1.0 s", "1:00", "3:07", "2:03:07", "3 d 4 h", "0 ms"]
    assert [style.duration(each) for each in seconds] == texts
    values = (None, math.nan, -math.inf, 0.12345678, 123456.7, 0.0)
    assert [style.amount(each) for each in values] == ["-", "nan", "inf", "0.1235", "123457", "0"]


def test_sizes_shares_and_ages() -> None:
    sizes = (None, 999.0, 1000, 25.3e9, 2e18)
    assert [style.size(each) for each in sizes] == ["-", "999 B", "1.0 kB", "25 GB", "2000.0 PB"]
    assert [style.percent(each) for each in (None, 0.314, math.nan)] == ["-", "31 %", "-"]
    assert [style.age(each) for each in (None, 1.0, 12.3, 187.0)] == ["-", "now", "12 s", "3:07"]
    assert style.clock(None) == "--:--:--"


def test_a_sparkline_averages_groups_and_leaves_gaps() -> None:
    assert style.sparkline([1, 2, 3, 4], 10) == "▁▃▆█"
    assert style.sparkline([0, 2, 4, 4], 2) == "▁█"
    assert style.sparkline([1.0, None, math.nan, 3.0], 4) == "▁  █"
    assert style.sparkline([2.0, 2.0], 4) == "▁▁"
    assert style.sparkline([None], 4) == style.sparkline([], 4) == style.sparkline([1.0], 0) == ""
    assert style.sparkline([1, 2, 3, 4], 10, ascii_only=True).isascii()
    values = [float(index % 2) for index in range(50)]
    assert style.sparkline([*values, 1e6], 51) == "▁█" * 25 + "█"  # an outlier does not flatten it


def test_a_bar_has_its_width() -> None:
    assert [style.bar(share, 4, ascii_only=True) for share in (None, 0.5, 2.0)] == ["----", "##--", "####"]


def test_foreign_text_cannot_control_the_terminal_and_a_line_of_a_log_keeps_its_indentation() -> None:
    text = "10%\r 50% \x1b[31mred\x1b[0m\x1b]0;title\x07 a\x07\x08b\x9b2J\tc\x1b[?1049h"
    for foreign, clean in ((text, "50% red ab2J c"), ("done\r", "done"), ("a\u2028 b  c ", "a b c")):
        assert style.clean(foreign) == clean
    assert style.clean_line("    raise  \x1b[31mError\x1b[0m \n") == "    raise  Error"
    assert style.clean_line("\ta\u2028b\r\n") == "        a b"
