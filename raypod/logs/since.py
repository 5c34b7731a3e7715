"""The points in time and the lines from which logs are shown."""

from __future__ import annotations

import datetime
import math
import os
import re
import time
from pathlib import Path
from typing import List

from raypod.errors import ConfigError
from raypod.host.log_times import Mark, offset_at

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_BLOCK_BYTES = 1 << 16


def parse_since(text: str) -> float:
    """Return the time that `--since` names, in seconds since 1970.

    Args:
        text: an age (`90s`, `10m`, `2h`, `1d`), a time in ISO 8601 (local time without a zone), or seconds since 1970.

    Raises:
        ConfigError: the text is none of them.
    """
    age = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if age:
        return time.time() - float(age.group(1)) * _UNITS_S[age.group(2)]
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if math.isfinite(seconds) and seconds >= 0:
        return seconds
    try:
        return datetime.datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text)).timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(
            f"--since {text}: must be an age such as 10m or 2h, a time such as 2026-01-31T08:00, or seconds since 1970"
        ) from None


def offset_since(log: Path, marks: List[Mark], unix_s: float) -> int:
    """Return the offset of the line at which the output since a time begins; without marks 0, or the end of an old log.

    Lines of a few seconds before that time can follow it: marks are some seconds apart.
    """
    facts = log.stat()
    if facts.st_mtime < unix_s:
        return facts.st_size
    return _line_start(log, offset_at(marks, unix_s))


def offset_of_tail(log: Path, lines: int) -> int:
    """Return the offset at which the last lines of a file begin; a last line without a newline counts."""
    with log.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        if end == 0 or lines == 0:
            return end
        file.seek(end - 1)
        left = lines + (file.read(1) == b"\n")  # newlines to find; the one before the first of these lines is the last
        position = end
        while position > 0:
            size = min(_BLOCK_BYTES, position)
            position -= size
            file.seek(position)
            block = file.read(size)
            if block.count(b"\n") < left:
                left -= block.count(b"\n")
                continue
            at = len(block)
            for _ in range(left):
                at = block.rfind(b"\n", 0, at)
            return position + at + 1
    return 0


def _line_start(log: Path, offset: int) -> int:
    """Return the offset of the line that contains the byte at `offset`."""
    with log.open("rb") as file:
        while offset > 0:
            size = min(_BLOCK_BYTES, offset)
            file.seek(offset - size)
            at = file.read(size).rfind(b"\n")
            if at >= 0:
                return offset - size + at + 1
            offset -= size
    return 0
