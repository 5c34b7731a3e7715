"""The heartbeat reports the activity of the working thread; the stop gate ends all instances after the same call."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any, Callable, Iterator

import pytest
from _pod import telemetry
from _pod.wires import Group

from raypod.errors import CollectiveBroken, WaitTimedOut
from raypod.runtime.worker.control import IDLE, LOADING, RETRYING, Heartbeat, StopGate
from tests.support.bounded import wait_until


def test_the_report_has_the_current_activity_and_the_slowest_call(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = Heartbeat(3)
    report = heartbeat.beat()
    assert (report.instance, report.activity, report.slowest_call_s) == (3, IDLE, None)
    with heartbeat.set_activity("save"):
        assert heartbeat.beat().activity == "save"
        with heartbeat.in_call(4):
            assert heartbeat.beat().activity == "in call 5"
        assert heartbeat.beat().activity == "save"
    assert (heartbeat.beat().activity, heartbeat.beat().calls) == (IDLE, 1)
    heartbeat, clock, slowest = Heartbeat(0), [0.0], []
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    for seconds in (100.0, 2.0, 5.0, 3.0):  # the first call counts only until there is another
        with heartbeat.in_call(0):
            clock[0] += seconds
        slowest.append(heartbeat.beat().slowest_call_s)
    assert slowest == [100.0, 2.0, 5.0, 5.0]


def test_a_wait_to_load_again_is_shown_and_ends_when_another_instance_is_lost() -> None:
    heartbeat, gate = Heartbeat(3), StopGate(timeout_s=10.0)
    gate.wait_to_load(0.01, heartbeat)
    with heartbeat.set_activity(LOADING), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gate.wait_to_load, 60.0, heartbeat)
        assert wait_until(lambda: heartbeat.beat().activity == RETRYING)
        assert heartbeat.is_loading
        gate.stop_after(0)
        with pytest.raises(CollectiveBroken, match="instance 3 .*the loading was aborted"):
            waiting.result(10)
        assert heartbeat.beat().activity == LOADING


@contextlib.contextmanager
def working(do: Callable[[threading.Event, threading.Event], None], instance: int = 0) -> Iterator[Heartbeat]:
    """The heartbeat of an instance whose thread is in `do(inside, end)`, which sets the one and waits for the other."""
    heartbeat, inside, end = Heartbeat(instance), threading.Event(), threading.Event()
    assert heartbeat.stack() == ""

    def work() -> None:
        with heartbeat.in_call(6):
            do(inside, end)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert inside.wait(10)
        yield heartbeat
    finally:
        end.set()
        thread.join()


def in_user_code(inside: threading.Event, end: threading.Event) -> None:
    inside.set()
    end.wait(10)


def in_a_collective(inside: threading.Event, end: threading.Event) -> None:
    def barrier() -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: in_user_code(inside, end))

    Group("pod", 0, 2, SimpleNamespace(barrier=barrier), 10.0).barrier()


def in_a_collective_of_a_replica(inside: threading.Event, end: threading.Event) -> None:
    def work(thread: int) -> None:
        with telemetry.working_for(thread):
            in_a_collective(inside, end)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work, threading.get_ident()).result()


def in_horovod(inside: threading.Event, end: threading.Event) -> None:
    module = ModuleType("horovod.torch.mpi_ops")
    exec("def synchronize(work, *events):\n    work(*events)\n", module.__dict__)
    module.synchronize(in_user_code, inside, end)


@pytest.mark.parametrize(
    ("do", "waits"),
    [(in_user_code, False), (in_a_collective, True), (in_a_collective_of_a_replica, True), (in_horovod, True)],
)
def test_the_heartbeat_shows_where_the_thread_is_or_waits(
    do: Any, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "horovod", ModuleType("horovod"))
    sys.modules["horovod"].__file__ = "/site-packages/horovod/__init__.py"  # an installed one
    with working(do) as heartbeat:
        assert do.__name__ in heartbeat.stack()
        assert heartbeat.waits_for_others() is waits
    assert not heartbeat.waits_for_others()


def in_a_busy_loop(inside: threading.Event, end: threading.Event) -> None:
    used_s = time.thread_time()
    while time.thread_time() - used_s < 0.2:
        pass
    in_user_code(inside, end)


def test_the_report_contains_the_cpu_time_of_the_working_thread() -> None:
    with working(in_a_busy_loop) as heartbeat:
        assert heartbeat.beat().cpu_s > 0.15


def test_a_paused_gate_waits_for_the_call_to_stop_after() -> None:
    gate = StopGate(timeout_s=10.0)
    assert gate.enter(0)
    assert gate.pause() == 1
    threading.Timer(0.05, gate.stop_after, [2]).start()
    assert gate.enter(1)  # another instance has started it already
    assert not gate.enter(2)
    gate.reopen()
    assert gate.enter(2)
    late = StopGate(timeout_s=0.01)
    late.pause()
    with pytest.raises(WaitTimedOut, match=r"run\.report_timeout_s"):
        late.enter(0)
