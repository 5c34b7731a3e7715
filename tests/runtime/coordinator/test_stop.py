"""What each signal does to a run, by the phase of the run and the flags of preemptions."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any, List, Tuple

import pytest

from raypod.errors import Preempted
from raypod.plan.sections import RunSection
from raypod.runtime.coordinator import stop as stop_module
from raypod.runtime.coordinator.stop import Stop, deadline_of, stop_on_signal
from raypod.system import signals
from tests.support.bounded import wait_until

GRACE = {"preemption_grace_s": 60.0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that `later` advances, so that no signal is a copy of the one before."""
    clock = SimpleNamespace(now_s=7.0)
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def stop_with(**flags: Any) -> Stop:
    stop = Stop()
    stop.configure(RunSection(**flags))
    return stop


def send(stop: Stop, clock: Any, number: int) -> None:
    clock.now_s += 1.0
    stop.on_signal(number, None)


def state(stop: Stop) -> Tuple[bool, bool, bool]:
    return stop.requested, stop.is_preempted, stop.must_leave


@pytest.mark.parametrize(
    ("flags", "number", "expected"),
    [
        ({}, signal.SIGTERM, (True, False, False)),
        ({}, signal.SIGINT, (True, False, False)),
        ({}, signal.SIGUSR1, (True, True, False)),
        ({"preemption_exit_code": 85}, signal.SIGTERM, (True, True, False)),
        (GRACE, signal.SIGTERM, (True, True, True)),
        (GRACE, signal.SIGUSR1, (True, True, True)),
        (GRACE, signal.SIGINT, (True, False, False)),
        (GRACE, signal.SIGHUP, (True, False, False)),
    ],
)
def test_a_signal_during_training(clock: Any, flags: Any, number: int, expected: Any) -> None:
    stop = stop_with(**flags)
    with stop.deferred():
        send(stop, clock, number)
    assert state(stop) == expected
    assert stop.is_signalled


def test_a_notice_before_the_training_ends_the_run_with_the_chosen_code(clock: Any) -> None:
    stop = stop_with(preemption_exit_code=85)
    with pytest.raises(Preempted, match="^preempted: nothing had started") as raised:
        send(stop, clock, signal.SIGTERM)
    assert raised.value.exit_code == 85
    with pytest.raises(Preempted):
        stop.check()
    plain = stop_with()
    with pytest.raises(KeyboardInterrupt) as interrupted:
        send(plain, clock, signal.SIGTERM)
    assert not isinstance(interrupted.value, Preempted)


def test_a_second_notice_shortens_no_grace_period_and_ctrl_c_does(clock: Any) -> None:
    stop = stop_with(**GRACE)
    with stop.deferred():
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            send(stop, clock, number)
        with pytest.raises(Preempted):
            send(stop, clock, signal.SIGINT)


def test_without_a_grace_period_a_second_signal_ends_the_run_at_once(clock: Any) -> None:
    stop = stop_with(preemption_exit_code=85)
    with stop.deferred():
        send(stop, clock, signal.SIGTERM)
        with pytest.raises(Preempted):
            send(stop, clock, signal.SIGTERM)


def test_a_notice_after_ctrl_c_only_bounds_the_end(clock: Any) -> None:
    stop = stop_with(**GRACE)
    with stop.deferred():
        send(stop, clock, signal.SIGINT)
        send(stop, clock, signal.SIGTERM)
    assert state(stop) == (True, False, True)  # the user has stopped the run: it is not preempted


def test_a_notice_while_the_run_ends_lets_it_end(clock: Any) -> None:
    for flags in (GRACE, {"preemption_exit_code": 85}):
        stop = stop_with(**flags)
        stop.begin_end()
        send(stop, clock, signal.SIGTERM)
        assert not stop.is_signalled
    with pytest.raises(KeyboardInterrupt):
        send(stop, clock, signal.SIGTERM)


def test_only_training_is_interrupted_shortly_before_the_deadline(clock: Any) -> None:
    stop = stop_with(**GRACE)
    with stop_on_signal(stop), stop.deferred():
        send(stop, clock, signal.SIGTERM)
        with stop.saving():
            stop.interrupt_late()
        with pytest.raises(Preempted, match="the 60 s of --preemption-grace-s end"):
            stop.interrupt_late()


def test_an_exception_that_replaces_the_one_of_a_handler(clock: Any) -> None:
    def replaced() -> None:
        try:
            send(stop, clock, signal.SIGTERM)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # as Ray does

    stop = stop_with(**GRACE)
    with pytest.raises(Preempted), stop_on_signal(stop):
        replaced()


def test_a_host_that_ray_drains_is_a_preemption_if_that_is_configured() -> None:
    for flags, expected in (({}, False), (GRACE, True)):
        stop = stop_with(**flags)
        stop.request("Ray drains host a", is_drained=True)
        assert (stop.requested, stop.is_preempted, stop.cause) == (True, expected, "Ray drains host a")


def test_an_unknown_state_does_not_keep_the_process_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    monkeypatch.setattr(stop_module, "abort", ended.append)
    exits: List[int] = []
    monkeypatch.setattr(stop_module, "os", SimpleNamespace(_exit=exits.append))
    stop = stop_with(**GRACE, preemption_exit_code=85)

    def fail() -> str:
        raise OSError("no disk")

    stop.describe = fail
    stop.end_now()
    assert str(ended[0]).endswith("the state of the run is unknown (OSError: no disk)")
    assert ended[0].exit_code == 85
    assert wait_until(lambda: exits == [85])  # also if a disk hangs, so that `abort` does not return


def test_the_contexts_restore_handlers_and_wakeup_descriptor() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    stop = stop_with(**GRACE)
    with deadline_of(stop), deadline_of(stop):
        assert stop.has_deadline
        descriptor = signal.set_wakeup_fd(-1)
        assert descriptor != -1
        signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    assert not stop.has_deadline
    assert signal.set_wakeup_fd(-1) == -1
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == before


def test_the_time_that_is_left_after_a_notice(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    stop = stop_with(**GRACE)
    assert stop.seconds_left() is None
    with stop.deferred():
        send(stop, clock, signal.SIGTERM)
        assert stop.seconds_left() == 60 - 5
        clock.now_s += 40
        send(stop, clock, signal.SIGTERM)  # repeated: it changes no deadline
        assert stop.seconds_left() == 60 - 5 - 41
    unlimited = stop_with()
    with unlimited.deferred():
        send(unlimited, clock, signal.SIGUSR1)
        assert unlimited.seconds_left() is None
