"""Copies of signals, the deadline after one, and a terminal that is closed while a training runs."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Iterator, List

import psutil
import pytest

from raypod.runs import run_state
from raypod.runtime.coordinator.stop import Stop
from raypod.system import signals
from raypod.system.signals import SignalDeadline
from tests.support.bounded import GONE_WITHIN_S, wait_until

WITHIN_S = 0.3


def test_copies_of_a_signal_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [7.0]
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    requests = signals.SignalFilter()
    found = []
    for elapsed_s in (0.0, 0.001, 0.1, 0.5, 0.001):
        now_s[0] += elapsed_s
        found.append(requests.is_copy())
    assert found == [False, True, True, False, True]


def test_a_postponed_signal_is_delivered_at_the_end_of_the_context() -> None:
    done = []

    def work() -> None:
        with signals.postponed_signals():
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_sighup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signals.stop_signals() == [signal.SIGINT, signal.SIGTERM]
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in signals.stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_ends_a_run_with_a_checkpoint(processes: None, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    line = [sys.executable, "-m", "raypod.train", "--device", "emulated", "--fleet", "inline", "--epochs", "400"]
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        os.execv(sys.executable, [*line, "--num-instances", "1", "--run-dir", str(folder)])
    process, metrics = psutil.Process(pid), folder / "metrics.jsonl"
    try:
        is_training = wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 3, 120)
        os.close(terminal)
        assert process.wait(60) == 130
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert is_training
    state = run_state.read(folder)
    assert state is not None
    assert state.state == run_state.INTERRUPTED
    assert (folder / "checkpoints" / "LATEST").is_file()


@pytest.mark.parametrize(("seconds", "is_left"), [(0, False), (3, False), (1000, True)])
def test_only_the_alarm_of_ray_is_cancelled_by_a_stop(seconds: int, is_left: bool) -> None:
    stop = Stop()
    signal.alarm(seconds)
    try:
        with stop.deferred():
            stop.on_signal(signal.SIGTERM, None)
        assert (signal.alarm(0) > 0) == is_left
    finally:
        signal.alarm(0)
    assert stop.requested


@pytest.fixture
def handled() -> Iterator[List[str]]:
    """The steps that were made; SIGUSR1 and SIGUSR2 are handled."""
    steps: List[str] = []
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(number, lambda *_: steps.append("handled")) for number in numbers]
    yield steps
    for number, handler in zip(numbers, before):
        signal.signal(number, handler)


def test_the_steps_of_a_deadline_follow_its_signal_in_order(handled: List[str]) -> None:
    began_s = time.monotonic()
    made = SignalDeadline(
        [signal.SIGUSR1], WITHIN_S, lambda: handled.append("interrupt"), lambda: handled.append("end")
    )
    signal.raise_signal(signal.SIGUSR2)  # not of the deadline
    time.sleep(1.5 * WITHIN_S)
    assert handled == ["handled"]
    signal.raise_signal(signal.SIGUSR1)
    assert wait_until(lambda: len(handled) == 4)
    assert handled == ["handled", "handled", "interrupt", "end"]
    assert time.monotonic() - began_s >= 2.3 * WITHIN_S
    made.close()


def test_a_signal_reaches_the_reader_before_it(handled: List[str]) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
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
        os.close(reader)
        os.close(writer)
