from __future__ import annotations

import threading
from typing import Iterator, List

import pytest
from bounded import wait_until

from raypod.prefetch import ahead, timed


def test_batches_come_in_order_and_are_made_ahead() -> None:
    made: List[int] = []

    def batches() -> Iterator[int]:
        for number in range(6):
            made.append(number)
            yield number

    taken = ahead(batches(), depth=2)
    assert next(taken) == 0
    assert wait_until(lambda: made == [0, 1, 2, 3])  # two wait, and a third is in the maker's hands
    assert list(taken) == [1, 2, 3, 4, 5]


def test_an_error_comes_in_its_place() -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    taken = ahead(batches(), depth=1)
    assert next(taken) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(taken)


def test_the_thread_ends_with_whoever_takes() -> None:
    before = threading.active_count()
    taken = timed(ahead(iter(range(1000)), depth=1))
    next(taken)
    taken.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_waiting_is_timed() -> None:
    go_on = threading.Event()

    def batches() -> Iterator[int]:
        yield 1
        go_on.wait(0.2)
        yield 2

    waits = [wait_s for _, wait_s in timed(batches())]
    assert waits[0] < 0.1 < waits[1]
