"""Numbers, times and foreign text as short, printable words for a terminal; sparklines and bars."""

from __future__ import annotations

import math
import time
from typing import List, Optional, Sequence

from raypod.system.command_line import printable

_BLOCKS, _ASCII_BLOCKS = " ▁▂▃▄▅▆▇█", " _.-:=+*#"
_OUTLIERS, _MANY = 0.02, 25  # share of the groups at each end, from so many groups on
UNKNOWN = "-"


def clean(text: str) -> str:
    """Return foreign text without control characters and escape sequences, in one line with single spaces."""
    return " ".join(clean_line(text).split())


def clean_line(line: str) -> str:
    """Return a line of a log without control characters and escape sequences, with its indentation."""
    line = line.rstrip("\r\n")  # ssh ends its messages with both
    shown = printable(line.rpartition("\r")[2] or line)
    return " ".join(shown.expandtabs().splitlines()).rstrip()  # U+2028 and others are line ends, too


def duration(seconds: Optional[float]) -> str:
    """Return a duration: `85 ms`, `4.2 s`, `3:07`, `2:03:07`, `3 d 4 h`."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    seconds = max(0.0, seconds)
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def age(seconds: Optional[float]) -> str:
    """Return how long ago something was, without fractions: `now`, `12 s`, `3:07`."""
    if seconds is None:
        return UNKNOWN
    if seconds < 1.5:
        return "now"
    return f"{seconds:.0f} s" if seconds < 59.5 else duration(seconds)


def amount(value: Optional[float], digits: int = 4) -> str:
    """Return a number with at most `digits` significant digits."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}" if abs(value) < 1e7 else f"{value:.{digits}g}"
    return f"{value:.{digits}g}"


def percent(share: Optional[float]) -> str:
    """Return a share of 0..1 in percent."""
    return UNKNOWN if share is None or not math.isfinite(share) else f"{100 * share:.0f} %"


def size(count: Optional[float]) -> str:
    """Return bytes with a decimal prefix, as in `1.3 GB`."""
    if count is None:
        return UNKNOWN
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if count >= 9.95 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} PB"


def clock(unix_s: Optional[float]) -> str:
    """Return the local time of day."""
    if unix_s is None or not math.isfinite(unix_s):
        return "--:--:--"
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def sparkline(values: Sequence[Optional[float]], width: int, ascii_only: bool = False) -> str:
    """Return values as a line of blocks of increasing height, at most `width` characters, oldest first.

    More values than characters are averaged in groups. A group without a finite value is a space. Of many groups, the
    highest and the lowest 2 % do not stretch the range.
    """
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    groups = _averages(values, width)
    known = [each for each in groups if each is not None]
    if not known:
        return ""
    ordered = sorted(known)
    outliers = math.ceil(_OUTLIERS * len(known)) if len(known) >= _MANY else 0
    low, high = ordered[outliers], ordered[-1 - outliers]
    scale = (len(blocks) - 2) / (high - low) if high > low else 0.0
    return "".join(
        " " if each is None else blocks[1 + round((min(max(each, low), high) - low) * scale)] for each in groups
    )


def bar(share: Optional[float], width: int, ascii_only: bool = False) -> str:
    """Return a bar of `width` characters for a share of 0..1."""
    full, empty = "#-" if ascii_only else "━─"
    done = round(min(1.0, max(0.0, share or 0.0)) * width)
    return full * done + empty * (width - done)


def _averages(values: Sequence[Optional[float]], width: int) -> List[Optional[float]]:
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)] if count > 0 else []
    found: List[Optional[float]] = []
    for first, last in zip(edges, edges[1:]):
        group = [each for each in values[first:last] if each is not None and math.isfinite(each)]
        found.append(math.fsum(group) / len(group) if group else None)
    return found
