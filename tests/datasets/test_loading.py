from __future__ import annotations

import threading
import time
from typing import Iterator, List

import pytest
from bounded import wait_until

from raypod.datasets.loading import ahead, prepared, timed


def no_interrupt() -> None:
    raise AssertionError("nothing is blocked")


def test_batches_come_in_order_and_are_made_ahead() -> None:
    made: List[int] = []

    def batches() -> Iterator[int]:
        for number in range(6):
            made.append(number)
            yield number

    taken = ahead(batches(), 2, no_interrupt)
    assert next(taken) == 0
    assert wait_until(lambda: made == [0, 1, 2, 3])  # two wait, and a third is in the maker's hands
    assert list(taken) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("workers", [1, 3])
def test_what_is_made_by_several_threads_comes_in_order(workers: int) -> None:
    def make(number: int) -> int:
        time.sleep(0.002 * (number % 3))  # later ones are done earlier
        return number * number

    assert list(prepared(make, iter(range(20)), workers, depth=workers)) == [number * number for number in range(20)]


def test_an_error_of_a_thread_comes_in_its_place_and_ends_the_threads() -> None:
    before = threading.active_count()
    taken = prepared(lambda number: 6 // number, iter([3, 0, 1]), workers=1, depth=2)
    assert next(taken) == 2
    with pytest.raises(ZeroDivisionError):
        next(taken)
    assert threading.active_count() == before


def test_an_error_comes_in_its_place() -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    taken = ahead(batches(), 1, no_interrupt)
    assert next(taken) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(taken)


def test_the_thread_ends_with_whoever_takes() -> None:
    before = threading.active_count()
    taken = timed(ahead(iter(range(1000)), 1, no_interrupt))
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
