"""Reduce the rows of a long run to a bounded number, so that no peak and no dip is lost.

The updates are divided into intervals of equal width, a power of two. Of each interval these rows are kept: for every
value the row with its minimum and the row with its maximum, and the first row that lacks a value. Rows are kept whole,
so that every point of a curve is one that was measured.
"""

from __future__ import annotations

import math
from typing import List, Sequence, Set

Row = List[float]  # [update, samples, time in seconds, values ...]; NaN for a value that is missing
FIRST_VALUE = 3  # index of the first value in a row


def decimate(rows: Sequence[Row], max_rows: int) -> List[Row]:
    """Return at most `max_rows` rows (at least 100), in the same order, with the first and the last one.

    Decimating the result of a decimation gives what decimating all rows with the same width would give.
    """
    max_rows = max(100, max_rows)
    if len(rows) <= max_rows:
        return list(rows)
    num_values = len(rows[0]) - FIRST_VALUE
    kept_per_interval = max(1, 2 * num_values + 1)
    intervals = max(1, (max_rows - 2) // kept_per_interval - 1)  # one more if the first is not aligned
    span = rows[-1][0] - rows[0][0] + 1
    width = 1
    while width * intervals < span:
        width *= 2
    kept: Set[int] = {0, len(rows) - 1}
    begin = 0
    while begin < len(rows):
        number, end = rows[begin][0] // width, begin + 1
        while end < len(rows) and rows[end][0] // width == number:
            end += 1
        kept.update(_extremes(rows, begin, end))
        begin = end
    return [rows[index] for index in sorted(kept)]


def _extremes(rows: Sequence[Row], begin: int, end: int) -> Set[int]:
    """Return the indices of the rows of an interval that are kept."""
    kept: Set[int] = set()
    if len(rows[begin]) == FIRST_VALUE:
        kept.add(begin)
    for column in range(FIRST_VALUE, len(rows[begin])):
        values = [row[column] for row in rows[begin:end]]
        if not all(map(math.isfinite, values)):
            kept.add(begin + next(index for index, value in enumerate(values) if not math.isfinite(value)))
            finite = [value for value in values if math.isfinite(value)]
            if not finite:
                continue
            kept.update((begin + values.index(min(finite)), begin + values.index(max(finite))))
        else:
            kept.update((begin + values.index(min(values)), begin + values.index(max(values))))
    return kept
