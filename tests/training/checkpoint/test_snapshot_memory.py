"""Snapshots in the memory of a host: complete ones are found, and survive the process that has written them."""

from __future__ import annotations

import contextlib
from typing import Iterator, List

import numpy as np
import pytest

from raypod.training.checkpoint.snapshots import Place, SnapshotMemory, read, write


def state_of(update: int) -> List[np.ndarray]:
    return [np.full(size, update, dtype=np.uint8) for size in (3, 1 << 21, update)]


@pytest.fixture
def memory() -> Iterator[SnapshotMemory]:
    with contextlib.closing(SnapshotMemory()) as found:
        yield found


def test_the_two_newest_snapshots_are_kept(memory: SnapshotMemory) -> None:
    assert memory.updates() == []
    for update in (9, 6, 2, 4, 6):  # after 9 the run has gone back
        write(memory.place(), update, state_of(update))
    assert sorted(memory.updates()) == [6, 9]
    for update in (6, 9):
        assert np.array_equal(read(memory.place(), update), np.concatenate(state_of(update)))
    with pytest.raises(FileNotFoundError, match="no snapshot of update 4"):
        read(memory.place(), 4)


def test_a_snapshot_whose_writer_has_ended_before_the_end_does_not_count(memory: SnapshotMemory) -> None:
    write(memory.place(), 2, state_of(2))
    write(memory.place(), 4, state_of(4))

    def ends() -> Iterator[np.ndarray]:
        yield from state_of(6)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(memory.place(), 6, ends())
    assert memory.updates() == [4]


def test_nothing_is_left_after_the_end_of_the_process_that_has_them() -> None:
    ended = Place(1 << 22, 1, (3, 4))
    for use in (lambda: write(ended, 2, []), lambda: read(ended, 2)):
        with pytest.raises(FileNotFoundError, match="has ended"):
            use()
