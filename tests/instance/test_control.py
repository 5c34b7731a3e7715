"""The heartbeat reports the activity of the working thread; the stop gate ends all instances after the same call."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from raypod.errors import CollectiveBroken, WaitTimedOut
from raypod.instance.control import IDLE, LOADING, RETRYING, Heartbeat, StopGate
from tests.support.bounded import wait_until


def test_the_report_contains_the_current_activity() -> None:
    heartbeat = Heartbeat(3)
    report = heartbeat.beat()
    assert (report.instance, report.activity, report.slowest_call_s) == (3, IDLE, None)
    with heartbeat.set_activity("save"):
        assert heartbeat.beat().activity == "save"
        with heartbeat.in_call(4):
            assert heartbeat.beat().activity == "in call 5"
        assert heartbeat.beat().activity == "save"
    assert (heartbeat.beat().activity, heartbeat.beat().calls) == (IDLE, 1)


def test_the_first_call_counts_only_until_there_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat, clock = Heartbeat(0), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    slowest = []
    for seconds in (100.0, 2.0, 5.0, 3.0):
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


@pytest.mark.parametrize(
    ("file", "waits"),
    [("/x/emulated_sdk/_pod/store_client.py", True), ("/x/horovod/torch/mpi_ops.py", True), ("/x/program.py", False)],
)
def test_the_stack_shows_where_the_thread_is_and_whether_it_waits_for_others(file: str, waits: bool) -> None:
    heartbeat, inside, end = Heartbeat(0), threading.Event(), threading.Event()
    assert heartbeat.stack() == ""
    functions = {"inside": inside, "end": end}
    exec(compile("def in_this_function():\n    inside.set()\n    end.wait(10)\n", file, "exec"), functions)

    def work() -> None:
        with heartbeat.set_activity("x"):
            functions["in_this_function"]()  # type: ignore[operator]

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert inside.wait(10)
        assert "in_this_function" in heartbeat.stack()
        assert heartbeat.waits_for_others() is waits
    finally:
        end.set()
        thread.join()


def test_the_report_contains_the_cpu_time_of_the_working_thread() -> None:
    heartbeat, reports, end = Heartbeat(0), threading.Semaphore(0), threading.Event()

    def work() -> None:
        with heartbeat.set_activity("x"):
            used_s = time.thread_time()
            while time.thread_time() - used_s < 0.2:
                pass
            reports.release()
            end.wait(30)

    before_s = heartbeat.beat().cpu_s
    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert reports.acquire(timeout=30)
        assert heartbeat.beat().cpu_s - before_s > 0.15
    finally:
        end.set()
        thread.join()


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
