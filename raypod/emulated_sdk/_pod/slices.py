"""Ranges cut into equal parts."""

from __future__ import annotations

from typing import List


def even_slices(start: int, stop: int, count: int) -> List[slice]:
    """Cut start..stop-1 into `count` slices whose lengths differ by one at most; some may be empty."""
    edges = [start + (stop - start) * index // count for index in range(count + 1)]
    return [slice(low, high) for low, high in zip(edges, edges[1:])]
