from __future__ import annotations

import contextlib
import threading
import time
from typing import Iterator, List

import pytest
from bounded import wait_until

from raypod.datasets.loading import map_ahead, prefetch, timed


def no_interrupt() -> None:
    raise AssertionError("nothing is blocked")


def test_prefetch_keeps_the_order_and_fills_its_queue_in_advance() -> None:
    made: List[int] = []

    def batches() -> Iterator[int]:
        for number in range(6):
            made.append(number)
            yield number

    taken = prefetch(batches(), 2, no_interrupt)
    assert next(taken) == 0
    assert wait_until(lambda: made == [0, 1, 2, 3])  # two in the queue, and the thread holds a third
    assert list(taken) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("workers", [1, 3])
def test_map_ahead_keeps_the_order(workers: int) -> None:
    def make(number: int) -> int:
        time.sleep(0.002 * (number % 3))  # later requests finish earlier
        return number * number

    assert list(map_ahead(make, iter(range(20)), workers, depth=workers)) == [number * number for number in range(20)]


def test_map_ahead_raises_an_error_at_its_position_and_ends_its_threads() -> None:
    before = threading.active_count()
    taken = map_ahead(lambda number: 6 // number, iter([3, 0, 1]), workers=1, depth=2)
    assert next(taken) == 2
    with pytest.raises(ZeroDivisionError):
        next(taken)
    assert threading.active_count() == before


def test_prefetch_raises_an_error_at_its_position() -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    taken = prefetch(batches(), 1, no_interrupt)
    assert next(taken) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(taken)


def test_closing_timed_batches_ends_the_prefetch_thread() -> None:
    before = threading.active_count()
    taken = timed(prefetch(iter(range(1000)), 1, no_interrupt))
    next(taken)
    taken.close()
    assert threading.active_count() == before


def test_waits_are_timed() -> None:
    never = threading.Event()

    def batches() -> Iterator[int]:
        yield 1
        never.wait(0.2)
        yield 2

    waits = [wait_s for _, wait_s in timed(batches())]
    assert waits[0] < 0.1 < waits[1]


def test_the_context_is_entered_only_while_waiting() -> None:
    active, closed = [], []

    @contextlib.contextmanager
    def waiting() -> Iterator[None]:
        active.append(True)
        yield
        active.pop()

    def batches() -> Iterator[bool]:
        try:
            while True:
                yield bool(active)
        finally:
            closed.append(True)

    taken = timed(batches(), waiting)
    assert next(taken)[0]
    assert not active
    taken.close()
    assert closed
