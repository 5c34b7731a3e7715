"""What another thread hears of an instance at work."""

from __future__ import annotations

import threading
from typing import Iterator

import pytest

from raypod.instance.control import IDLE, LOADING, Pulse


def test_the_pulse_follows_what_is_done() -> None:
    pulse = Pulse(3)
    assert (pulse.beat().instance, pulse.beat().doing, pulse.beat().slowest_call_s) == (3, IDLE, None)
    with pulse.doing("save"):
        assert pulse.beat().doing == "save"
        with pulse.in_call(4):
            assert pulse.beat().doing == "in call 5"
        assert pulse.beat().doing == "save"
    assert (pulse.beat().doing, pulse.beat().calls) == (IDLE, 1)


def test_the_first_call_counts_only_while_it_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pulse, clock = Pulse(0), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    slowest = []
    for seconds in (100.0, 2.0, 5.0, 3.0):
        with pulse.in_call(0):
            clock[0] += seconds
        slowest.append(pulse.beat().slowest_call_s)
    assert slowest == [100.0, 2.0, 5.0, 5.0]


def test_loading_is_told_and_a_loader_left_early_is_closed() -> None:
    pulse, closed = Pulse(0), []

    def batches() -> Iterator[str]:
        try:
            while True:
                yield pulse.beat().doing
        finally:
            closed.append(True)

    loading = pulse.loading(batches())
    assert next(loading) == LOADING
    assert pulse.beat().doing == IDLE
    loading.close()  # type: ignore[attr-defined]
    assert closed


def test_the_stack_is_that_of_the_working_thread() -> None:
    pulse, inside, end = Pulse(0), threading.Event(), threading.Event()
    assert pulse.stack() == ""

    def work_of_the_user() -> None:
        with pulse.doing("x"):
            inside.set()
            end.wait(10)

    thread = threading.Thread(target=work_of_the_user)
    thread.start()
    try:
        assert inside.wait(10)
        assert "work_of_the_user" in pulse.stack()
        assert not pulse.waits_for_others()
    finally:
        end.set()
        thread.join()
