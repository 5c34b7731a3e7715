"""Waits for scripted actors, pauses of this process, survivors of a loss, and the cause of a death."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import pytest

from raypod.errors import ClusterError, CollectiveBroken, DeviceFailed
from raypod.events import HeartbeatReport
from raypod.plan.plan import Plan
from raypod.runtime.worker.control import IDLE
from raypod.runtime.workers import ray_wait
from raypod.runtime.workers.fleet import FleetBroken
from raypod.runtime.workers.ray_wait import NO_VALUE, PauseDetector, death_reason, exception_in, take_ready
from raypod.runtime.workers.ray_watch import Watch
from raypod.system.activity_record import Activity
from tests.support.scripted_ray import (
    NEVER,
    ActorDied,
    Ref,
    ScriptedActor,
    ScriptedRay,
    Stream,
    TaskError,
    WorkerCrashed,
    node,
)

BOUND = (100.0, "run.report_timeout_s")
IN_CALL = "in call 3"
DEATH = ActorDied("its process ended")


class Fleet:
    """Four scripted actors and their watch. The streams of all yield a report at once, and end when aborted."""

    def __init__(self, ray: ScriptedRay, plan: Plan) -> None:
        self.ray, self.frozen = ray, -1
        self.duration_s: Callable[[], float] = lambda: 1.0  # of the current activity of all
        self.reports = [HeartbeatReport(index, IN_CALL, 1.0, 2, 0.5, True) for index in range(4)]
        self.streams = [Stream([(0.0, f"report {index}")], NEVER) for index in range(4)]
        self.actors = [ScriptedActor(index, self.scripts(index)) for index in range(4)]
        hosts = [f"h{index}" for index in range(4)]
        self.watch = Watch(ray, plan, self.actors, hosts, ray)  # type: ignore[arg-type]
        self.watch.record_heartbeats(dict(enumerate(self.reports)))
        self.watch.add_streams({stream: index for index, stream in enumerate(self.streams)})

    def scripts(self, index: int) -> Dict[str, Callable[..., Any]]:
        abort = lambda: self.abort(index)  # noqa: E731
        return {"beat": lambda: self.beat(index), "abort_collectives": abort, "stack": lambda: Ref("the stack")}

    def beat(self, index: int) -> Ref:
        if index == self.frozen:
            return Ref(None, NEVER)
        return Ref(dataclasses.replace(self.reports[index], duration_s=self.duration_s()))

    def end_streams(self) -> None:
        for stream in self.streams:
            stream.end_s = 0.0
        self.follow()

    def abort(self, index: int) -> Ref:
        self.streams[index].end_s = 0.0
        return Ref(None)

    def die(self, index: int) -> None:
        self.streams[index].items.append((0.0, DEATH))

    def follow(self, on_tick: Callable[[], None] = lambda: None) -> Tuple[List[Any], Any]:
        found = []
        try:
            for index, item in self.watch.follow():
                if index is None:
                    on_tick()
                else:
                    found.append(item)
        except FleetBroken as broken:
            return found, broken
        return found, None


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> ScriptedRay:
    return ScriptedRay(monkeypatch)


@pytest.fixture
def fleet(make: Callable[..., Plan], ray: ScriptedRay) -> Fleet:
    return Fleet(ray, make(pod={"replicas": 4, "num_instances": 4}))


def test_all_that_is_ready_is_taken_with_two_waits_and_an_error_is_that_of_its_reference(ray: ScriptedRay) -> None:
    results, streams = [Ref(number) for number in range(64)], [Stream([(0.0, "item")]) for _ in range(64)]
    late = [Ref("late", NEVER), Stream([(NEVER, "late")])]
    arrivals = take_ready(ray, [*results, *late, *streams], 1.0)
    assert [each.ref for each in arrivals] == [*results, *streams]
    assert [each.value for each in arrivals] == [*range(64), *["item"] * 64]
    assert ([each.is_finished for each in arrivals], ray.waits) == ([True] * 64 + [False] * 64, 2)
    ends = take_ready(ray, [*late, *streams], 1.0)
    assert [(each.value, each.is_finished) for each in ends] == [(NO_VALUE, True)] * 64
    good, bad = take_ready(ray, [Ref(1), Ref(DEATH)], 1.0)
    assert (good.value, good.error, good.is_finished) == (1, None, True)
    assert (bad.error, bad.is_finished) == (DEATH, True)
    began_s = ray.now_s
    assert (take_ready(ray, [Ref(1, NEVER)], 0.5), ray.now_s) == ([], began_s + 0.5)
    assert take_ready(ray, [], 0.5) == []


def test_a_long_interval_between_two_polls_is_a_pause(ray: ScriptedRay) -> None:
    pauses = PauseDetector()
    ray.now_s += 1.0
    assert pauses.poll() == 0.0
    ray.now_s += 20.0
    assert pauses.poll() == 18.0  # the first two seconds count, or many pauses would keep a timeout from ending
    assert pauses.poll() == 0.0
    ray.now_s += 1.0
    assert (pauses.within(0.5, ray.now_s), pauses.within(11.0, ray.now_s)) == (0.0, 10.0)
    assert pauses.within(100.0, ray.now_s) == 18.0


def lost(broken: FleetBroken) -> List[Tuple[int, str]]:
    return [(loss.instance, loss.kind) for loss in broken.losses]


def pause(fleet: Fleet, answers: Dict[int, Ref]) -> Callable[[], None]:
    """Return what requests a pause at the first tick."""
    requested: List[Any] = []

    def request() -> None:
        if not requested:
            refs = {answers.get(index, Ref(3)): index for index in range(4)}
            requested.append(fleet.watch.add_requests(refs, "pause of all instances", BOUND))

    return request


def test_reports_that_arrive_during_a_pause_are_yielded_if_an_instance_dies_in_it(fleet: Fleet) -> None:
    for index, stream in enumerate(fleet.streams):
        stream.items.append((1000.5, f"second report {index}"))
    found, broken = fleet.follow(pause(fleet, {3: Ref(DEATH, 1000.2)}))
    assert sorted(found) == sorted(f"{which} {index}" for index in range(4) for which in ("report", "second report"))
    assert lost(broken) == [(3, "died")]


def test_survivors_that_have_answered_the_pause_are_released(fleet: Fleet) -> None:
    pausing = pause(fleet, {3: Ref(DEATH, 1001.0)})
    fleet.reports[:3] = [HeartbeatReport(index, IDLE, 1.0, 2, 0.5, False) for index in range(3)]
    _, broken = fleet.follow(pausing)
    assert lost(broken) == [(3, "died")]
    assert all("abort_collectives" in fleet.actors[index].called for index in range(3))
    assert fleet.ray.now_s < 1003


def test_an_instance_that_does_not_answer_a_pause_is_silent_and_the_others_survive(fleet: Fleet) -> None:
    fleet.frozen = 3
    _, broken = fleet.follow(pause(fleet, {3: Ref(None, NEVER)}))
    assert (lost(broken), fleet.ray.killed) == ([(3, "silent")], [3])


def hold_the_lock(fleet: Fleet, index: int, calls_s: float, activity: str = IN_CALL) -> None:
    """Let the interpreter lock of an instance be held: only its record, and faulthandler's stacks, can be read."""
    began_s = fleet.ray.now_s

    def on_host(function: str, instance: int) -> Ref:
        assert instance == index
        if function == "stacks":
            return Ref("the stacks")
        return Ref(Activity(activity, fleet.ray.now_s - began_s, 2, calls_s, 0.0))

    fleet.frozen, fleet.ray.on_host = index, on_host


def test_an_instance_that_holds_its_interpreter_lock_is_judged_by_its_record(fleet: Fleet) -> None:
    began_s = fleet.ray.now_s
    hold_the_lock(fleet, 3, calls_s=30.0)
    _, broken = fleet.follow(pause(fleet, {3: Ref(None, NEVER)}))
    assert lost(broken) == [(3, "stuck")]
    assert "90.0 s" in broken.losses[0].cause  # three times its slowest call, although the pause was to end before
    assert broken.losses[0].stack == "the stacks"
    assert 90 < fleet.ray.now_s - began_s < 100


def test_a_call_that_cannot_be_interrupted_may_end_after_the_loss_of_another_instance(fleet: Fleet) -> None:
    hold_the_lock(fleet, 2, calls_s=30.0)
    ends_s = fleet.ray.now_s + 40.0

    def abort(index: int) -> Ref:
        fleet.streams[index].end_s = ends_s if index == 2 else 0.0
        return Ref(None, ends_s if index == 2 else 0.0)

    fleet.abort = abort  # type: ignore[method-assign]
    fleet.ray.now_s += 6.0
    fleet.die(3)
    _, broken = fleet.follow()
    assert lost(broken) == [(3, "died")]
    assert fleet.ray.now_s >= ends_s


def test_a_call_on_ipus_may_take_minutes_but_not_without_the_others(fleet: Fleet) -> None:
    hold_the_lock(fleet, 3, calls_s=0.5)
    began_s = fleet.ray.now_s
    fleet.watch.use_defaults_of("ipu")
    _, broken = fleet.follow()
    assert lost(broken) == [(3, "stuck")]
    assert "run.stuck_after_s = 900" in broken.losses[0].cause
    assert 900 < fleet.ray.now_s - began_s < 910


@pytest.mark.parametrize("loads_s", [60.0, 120.0])
def test_an_evaluation_that_loads_is_not_ended_by_another_request(fleet: Fleet, loads_s: float) -> None:
    fleet.end_streams()
    hold_the_lock(fleet, 3, calls_s=0.5, activity="evaluate")
    ends_s = fleet.ray.now_s + loads_s
    refs = {Ref("evaluated", ends_s if index == 3 else 0.0): index for index in range(4)}
    evaluated = fleet.watch.add_requests(refs, "evaluate of all instances", BOUND)
    fleet.watch.add_requests({Ref(None, ends_s): 3}, "abandon_evaluation", (25.0, "run.stop_timeout_s"))
    _, broken = fleet.follow()
    if loads_s < BOUND[0]:
        assert (broken, evaluated.results) == (None, dict.fromkeys(range(4), "evaluated"))
    else:
        assert lost(broken) == [(3, "stuck")]


def test_no_request_is_outstanding_once_the_fleet_is_broken(fleet: Fleet) -> None:
    slow_s = fleet.ray.now_s + 4.0
    aborted: List[int] = []

    def abort_slowly(index: int) -> Ref:
        aborted.append(index)
        fleet.streams[index].end_s = 0.0
        return Ref(None, slow_s)

    fleet.abort = abort_slowly  # type: ignore[method-assign]
    fleet.die(3)
    _, broken = fleet.follow()
    assert lost(broken) == [(3, "died")]
    assert fleet.ray.now_s >= slow_s
    assert aborted.count(0) == 1


def test_a_survivor_that_uses_cpu_time_may_end_its_collectives_late(fleet: Fleet) -> None:
    released_s = fleet.ray.now_s + 60.0
    work = [0.0]

    def beat(index: int) -> Ref:
        work[0] += 0.5 if index == 1 else 0.0
        cpu_s = work[0] if index == 1 else 0.0
        return Ref(HeartbeatReport(index, IN_CALL, 1.0, 2, 0.5, True, cpu_s))

    def abort(index: int) -> Ref:
        fleet.streams[index].end_s = released_s if index == 1 else NEVER if index == 2 else 0.0
        return Ref(None)

    fleet.beat, fleet.abort = beat, abort  # type: ignore[method-assign]
    fleet.die(3)
    _, broken = fleet.follow()
    assert lost(broken) == [(3, "died"), (2, "stuck")]
    assert "did not abort its collectives" in broken.losses[1].cause
    assert fleet.ray.now_s >= released_s


def test_the_results_that_arrived_before_a_loss_are_kept(fleet: Fleet) -> None:
    fleet.end_streams()
    refs = {Ref("saved"): 0, Ref(DEATH): 1}
    with pytest.raises(FleetBroken) as caught:
        fleet.watch.results(refs, "finish_saves of all instances", BOUND)
    assert caught.value.results == {0: "saved"}


def test_a_request_has_a_timeout_that_does_not_count_pauses_of_this_process(fleet: Fleet) -> None:
    fleet.end_streams()
    wait, stopped = fleet.ray.wait, []

    def stop_once(*arguments: Any, **options: Any) -> Any:
        if not stopped:
            stopped.append(True)
            fleet.ray.now_s += 500.0
        return wait(*arguments, **options)

    fleet.ray.wait = stop_once  # type: ignore[method-assign]
    refs = {Ref("late", fleet.ray.now_s + 550.0): 0}
    assert fleet.watch.results(refs, "a call", BOUND) == {0: "late"}
    with pytest.raises(FleetBroken, match=r"instance 0 on host h0 failed: waited 100 s for a call"):
        fleet.watch.results({Ref("never", NEVER): 0}, "a call", BOUND)


def test_a_frozen_instance_is_detected_although_this_process_pauses_all_the_time(fleet: Fleet) -> None:
    started_s = fleet.ray.now_s

    def pause() -> None:
        fleet.ray.now_s += 5.0
        assert fleet.ray.now_s - started_s < 120

    fleet.frozen = 2
    _, broken = fleet.follow(pause)
    assert lost(broken) == [(2, "silent")]


def test_the_time_in_which_the_whole_host_stood_still_makes_no_instance_stuck(fleet: Fleet) -> None:
    began_s, paused = fleet.ray.now_s, []

    def stand_still_once() -> None:
        if fleet.ray.now_s > began_s + 5.0 and not paused:
            paused.append(True)
            fleet.ray.now_s += 300.0

    fleet.frozen, fleet.duration_s = 2, lambda: fleet.ray.now_s - began_s
    _, broken = fleet.follow(stand_still_once)
    assert paused
    assert lost(broken) == [(2, "silent")]


def test_a_pause_of_survivors(make: Callable[..., Plan], ray: ScriptedRay, monkeypatch: pytest.MonkeyPatch) -> None:
    pod, bounds = {"replicas": 4, "num_instances": 4}, {"silent_after_s": 6, "stop_timeout_s": 10}
    fleet = Fleet(ray, make(pod=pod, run=bounds))
    fleet.streams[0].items.append((0.0, TaskError(CollectiveBroken(0, "timed out"))))
    released: List[int] = []

    def abort(index: int) -> Ref:
        if index == 2:  # it is frozen
            return Ref(None, NEVER)
        if index not in released:
            released.append(index)
            fleet.ray.now_s += 30.0 if index == 3 else 0.0
            fleet.streams[index].end_s = fleet.ray.now_s + 3.0
        return Ref(None)

    fleet.frozen = 2
    monkeypatch.setattr(fleet, "abort", abort)
    _, broken = fleet.follow()
    assert ({*released}, lost(broken)) == ({0, 1, 3}, [(2, "silent")])


def test_the_death_of_an_instance_is_the_cause_of_the_errors_of_the_others(fleet: Fleet) -> None:
    for index in range(3):
        fleet.streams[index].items.append((0.0, TaskError(CollectiveBroken(index, "connection reset"))))
    fleet.streams[3].items.append((1000.8, DEATH))
    _, broken = fleet.follow()
    assert lost(broken) == [(3, "died")]


@pytest.mark.parametrize("dies", [True, False])
def test_survivors_whose_devices_have_failed_are_lost_after_the_cause(fleet: Fleet, dies: bool) -> None:
    for index in (0, 2):
        failed = DeviceFailed(index, "a link is down", "PARTITION_RESET")
        fleet.streams[index].items.append((0.0, TaskError(failed)))
    if dies:
        fleet.die(3)
    _, broken = fleet.follow()
    assert lost(broken) == [*([(3, "died")] if dies else []), (0, "device"), (2, "device")]
    assert {each.recovery_action for each in broken.losses if each.kind == "device"} == {"PARTITION_RESET"}


@pytest.mark.parametrize("is_lost", [True, False])
def test_an_exception_in_an_instance_is_its_loss_unless_the_user_made_a_mistake(fleet: Fleet, is_lost: bool) -> None:
    cause = ValueError("no such layer") if is_lost else ClusterError("no address in data_network")
    fleet.streams[2].items.append((0.0, TaskError(cause)))
    if not is_lost:
        with pytest.raises(ClusterError, match="^no address in data_network$"):
            fleet.follow()
        return
    (loss,) = fleet.follow()[1].losses
    assert (loss.instance, loss.host, loss.kind, loss.cause) == (2, "h2", "raised", "ValueError: no such layer")
    assert loss.log_file.endswith("/logs/instance-2.log")


OF_RAY = (
    "[2026 E 8 9] logging.cc:118: Unhandled exception: 1E. what(): new /a/_raylet.so(+0x18) [0x7f] ray::operator<<()"
)
HEADER, NO_EXCEPTION = "instance 1 of 2, pid 8: ", "terminate called without an active exception"
PLACE = "in string_at, /a/ctypes/__init__.py line 519"
BUS_ERROR = "a memory-mapped file was truncated, or its disk is full or gone"
OLD = "instance 1 of 2, pid 7: started on a\nterminate called after throwing an instance of 'E'\n  what():  old\n"
SIGSEGV = "*** SIGSEGV received at time=1795714240 on cpu 0 ***\nPC: @     0x7f6976985ad8  (unknown)  (unknown)\n"
FAULT = (
    "Fatal Python error: Segmentation fault\n\nStack (most recent call first):\n"
    '  File "/a/ctypes/__init__.py", line 519 in string_at\n  File "/a/data.py", line 9 in __getitem__\n\n'
    "Extension modules: a._b (total: 1)\n"
)


@pytest.mark.parametrize(
    ("log", "exception"),
    [
        ("", None),
        (OLD, None),  # another process: the log of this one is on another host
        (f"{OLD}{HEADER}started on a\nx\n", ""),
        (f"{OLD}{HEADER}started on a\n{OF_RAY}\n/a.so(+0x18) [0x7f] f()\n", "what(): new"),
        (f"{OLD}{HEADER}started on a\n  what():  new:  gone\nAborted\n\udcff\n", "what(): new: gone"),
        (f"{HEADER}a\n{NO_EXCEPTION}\n", NO_EXCEPTION),
        (f"{HEADER}a\n{SIGSEGV}{FAULT}", f"segmentation fault {PLACE}"),
        (f"{HEADER}a\n{FAULT.replace('Segmentation fault', 'Bus error')}", f"bus error {PLACE}: {BUS_ERROR}"),
        (f"{HEADER}a\n{SIGSEGV}", "signal SIGSEGV"),
        (f"{HEADER}a\n  what():  no\nFatal Python error: Aborted\n", "what(): no"),
    ],
)
def test_the_exception_is_that_of_the_process(tmp_path: Path, log: str, exception: str) -> None:
    (tmp_path / "log").write_bytes(log.encode(errors="surrogateescape"))
    assert exception_in(str(tmp_path / "log"), HEADER) == exception
    assert exception_in(str(tmp_path / "none"), HEADER) is None


DOES_NOT_ANSWER = "its process or its host does not answer"
DETAIL = "Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file."
ENDED = "The actor died unexpectedly before finishing this task.\n\tpid: 7\n"
SILENT_END = "its process died: it ended without a message, as a process does that is killed or out of memory"
CAUSES = [" Some common causes include: (1) killed", " There are some potential root causes. (1) SIGKILL (2)"]
NO_ANSWER = (
    "The actor 0e02 is unavailable: RpcError: RPC error: {}. The task may or may not have been executed on the actor."
)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        *((f"{ENDED}{DETAIL}{rest}", SILENT_END) for rest in ("", *CAUSES)),
        (NO_ANSWER.format("Socket closed rpc_code: 14"), f"{DOES_NOT_ANSWER} (connection closed)"),
        (
            NO_ANSWER.format("Deadline\n Exceeded rpc_code: 4"),
            f"{DOES_NOT_ANSWER} (RpcError: RPC error: Deadline Exceeded rpc_code: 4)",
        ),
    ],
)
def test_deaths_without_a_message_and_hosts_that_do_not_answer_are_described(message: str, reason: str) -> None:
    assert death_reason(message) == reason


@pytest.mark.parametrize(
    ("exception", "cause"),
    [
        ("", SILENT_END),
        ("segmentation fault in f, a.py line 9", "its process died: it crashed (segmentation fault in f, a.py line 9)"),
        ("what(): no device", "its process died: it crashed (what(): no device)"),
    ],
)
def test_a_known_cause(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Plan], exception: str, cause: str) -> None:
    monkeypatch.setattr(ray_wait, "exception_in", lambda log_file, header: exception)
    assert ray_wait.death_causes(ScriptedRay(monkeypatch), make(), {1: ENDED + DETAIL}) == {1: cause}


def test_a_host_on_which_no_process_starts_is_named(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Plan]) -> None:
    monkeypatch.setattr(ray_wait, "exception_in", lambda log_file, header: None)
    monkeypatch.setattr(ray_wait, "node_affinity", lambda node: {"node": node["NodeID"]})
    ray = ScriptedRay(monkeypatch, node("10.0.0.12"))
    ray.start = lambda options, *arguments: Ref(WorkerCrashed())
    error = f"{ENDED}\tip: 10.0.0.12\n{DETAIL}"
    cause = "it crashed (the next process that Ray started there ended, too: is a disk of that host full?)"
    assert ray_wait.death_causes(ray, make(), {1: error}) == {1: f"its process died: {cause}"}
