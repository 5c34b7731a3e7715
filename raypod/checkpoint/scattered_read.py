"""Read a file into buffers that are consecutive in the file, in several threads and without a copy."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import List, Sequence, Tuple

_GROUP_BYTES = 8 << 20
_GROUP_BUFFERS = 512  # one system call reads into at most 1024
_THREADS = 2  # more do not help: the bandwidth of the memory is the limit

Group = Tuple[int, List[memoryview]]  # the offset of the first buffer in the file, and the buffers


def read_into(descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
    """Fill buffers, uint8 [bytes] each, from a position of an open file on.

    Raises:
        OSError: the file system's own.
        EOFError: the file ends before.
    """
    groups = _groups_of(offset, buffers)
    if len(groups) == 1:
        _read_group(descriptor, groups[0])
        return
    with ThreadPoolExecutor(_THREADS, "checkpoint-read") as pool:
        for each in [pool.submit(_read_group, descriptor, group) for group in groups]:
            each.result()


def _groups_of(offset: int, buffers: Sequence[memoryview]) -> List[Group]:
    """Divide the buffers into groups for one system call each."""
    groups: List[Group] = [(offset, [])]
    group_bytes = 0
    for buffer in buffers:
        for first in range(0, len(buffer), _GROUP_BYTES):
            part = buffer[first : first + _GROUP_BYTES]
            if group_bytes + len(part) > _GROUP_BYTES or len(groups[-1][1]) == _GROUP_BUFFERS:
                groups.append((offset, []))
                group_bytes = 0
            groups[-1][1].append(part)
            group_bytes += len(part)
            offset += len(part)
    return groups


def _read_group(descriptor: int, group: Group) -> None:
    offset, left = group
    while left:
        count = os.preadv(descriptor, left, offset)
        if not count:
            raise EOFError
        offset += count
        while left and count >= len(left[0]):
            count -= len(left[0])
            left = left[1:]
        if count:
            left = [left[0][count:], *left[1:]]
