"""Calls and loads that hold the interpreter lock, as on an IPU."""

from __future__ import annotations

import threading
import time
from typing import Iterator, List

import poptorch
import pytest
import torch
from _pod.activation import CALL_S, LOAD_S


@pytest.fixture
def ticks() -> Iterator[List[float]]:
    """Times at which another thread ran, a few milliseconds apart."""
    found: List[float] = []
    end = threading.Event()

    def run() -> None:
        while not end.wait(0.005):
            found.append(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    yield found
    end.set()
    thread.join()


def longest(ticks: List[float]) -> float:
    return max(after - before for before, after in zip(ticks, [*ticks[1:], time.monotonic()]))


@pytest.mark.parametrize("variable", [CALL_S, LOAD_S])
def test_no_other_thread_runs_meanwhile(variable: str, monkeypatch: pytest.MonkeyPatch, ticks: List[float]) -> None:
    model, x = poptorch.inferenceModel(torch.nn.Linear(2, 2)), torch.ones(1, 2)
    model.compile(x)
    model.detachFromDevice()
    while not ticks:
        time.sleep(0.01)
    monkeypatch.setenv(variable, "1.2")
    model(x)
    assert longest(ticks) > 0.9  # the signal of a profiler could end a sleep before


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_a_wrong_time_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CALL_S, text)
    with pytest.raises(poptorch.Error, match=f"EMULATED_POD_CALL_S={text}: must be a number of seconds"):
        poptorch.inferenceModel(torch.nn.Linear(2, 2))(torch.ones(1, 2))
