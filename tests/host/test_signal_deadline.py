"""The thread that ends a process in time after a signal."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Iterator, List

import pytest
from bounded import GONE_WITHIN_S, wait_until

from raypod.host.signal_deadline import SignalDeadline

WITHIN_S = 0.5


@pytest.fixture
def steps() -> List[str]:
    return []


@pytest.fixture
def deadline(steps: List[str]) -> Iterator[SignalDeadline]:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: steps.append("handled"))
    made = SignalDeadline([signal.SIGUSR1], WITHIN_S, lambda: steps.append("interrupt"), lambda: steps.append("end"))
    yield made
    made.close()
    signal.signal(signal.SIGUSR1, before)


def test_the_steps_follow_the_signal_in_order(deadline: SignalDeadline, steps: List[str]) -> None:
    began_s = time.monotonic()
    signal.raise_signal(signal.SIGUSR1)
    assert wait_until(lambda: len(steps) == 3)
    assert steps == ["handled", "interrupt", "end"]
    assert time.monotonic() - began_s >= 0.8 * WITHIN_S


def test_nothing_happens_without_the_signal_or_after_the_end(deadline: SignalDeadline, steps: List[str]) -> None:
    before = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    signal.raise_signal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)
    time.sleep(WITHIN_S)
    assert steps == []


def test_a_signal_reaches_the_reader_before_it(steps: List[str]) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    handler = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    first = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    made = SignalDeadline([signal.SIGUSR2], WITHIN_S, lambda: None, lambda: None)
    try:
        signal.raise_signal(signal.SIGUSR1)
        received: List[bytes] = []
        thread = threading.Thread(target=lambda: received.append(os.read(reader, 1)), daemon=True)
        thread.start()
        thread.join(GONE_WITHIN_S)
        assert received == [bytes([signal.SIGUSR1])]
    finally:
        made.close()
        assert signal.set_wakeup_fd(first) == writer
        signal.signal(signal.SIGUSR1, handler)
        os.close(reader)
        os.close(writer)
