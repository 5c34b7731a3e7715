"""Killed and frozen instances: the weights of an undisturbed run, and the survivors keep their processes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
from bounded import wait_until
from harness import Outcome, assert_undisturbed, pid_of, plan_for, run, send

from raypod.coordinator.recovery import seed
from raypod.fleet.ray import RayFleet
from raypod.fleet.ray_replace import kill_process
from raypod.host.process import process_start_ticks
from raypod.plan.plan import Plan

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The outcome of 4 replicas in one instance, in this process."""
    plan = plan_for(tmp_path_factory.mktemp("inline"), run={"fleet": "inline"}, pod={"num_instances": 1})
    return run(plan)


def lost(outcome: Outcome) -> List[Any]:
    return [(loss.instance, loss.kind) for loss in outcome.losses]


def test_one_instance_after_the_other_is_killed(session: Any, undisturbed: Outcome, tmp_path: Path) -> None:
    plan = plan_for(tmp_path, pod={"num_instances": 2}, run={"profile": "updates 3-12"})
    pids: List[int] = []

    def kill_0(plan: Plan) -> None:
        pids.extend(pid_of(plan, index) for index in (0, 1))
        send(signal.SIGKILL, 0)(plan)

    outcome = run(plan, [(5, kill_0), (14, send(signal.SIGKILL, 1))])
    assert_undisturbed(plan, outcome, undisturbed)
    assert lost(outcome) == [(0, "died"), (1, "died")]
    assert [repair.seeded_from for repair in outcome.repairs] == ["instance 1", "instance 0"]
    assert [repair.restarts for repair in outcome.repairs] == [1, 2]
    first, second = (Path(plan.log_file(index)).read_text() for index in (0, 1))
    assert (first.count(", pid "), second.count(", pid ")) == (2, 2)  # each was started twice
    assert pid_of(plan, 0) != pids[0]
    assert_profile(plan, pids)


def assert_profile(plan: Plan, pids: List[int]) -> None:
    """Assert that the profile has the calls of the killed instance 0, of its replacement, and of instance 1."""
    profile = json.loads((Path(plan.run_dir) / "profile.json").read_text())
    (part,) = profile["metadata"]["parts"]
    assert part["updates"] == [3, 12]
    assert "meet" in part["start_seconds"]
    assert len(part["clocks"]) == 3
    assert {(each["instance"], each["pid"]) for each in part["clocks"]} > {(0, pids[0]), (1, pids[1])}
    for each in part["clocks"]:  # all processes are on one host, whose clock is this one's
        assert abs(each["offset_s"]) <= each["error_s"] < 1
    by_kind = collections.Counter((event.get("cat"), event["pid"]) for event in profile["traceEvents"])
    first, replacement, survivor = (each["process"] for each in sorted(part["clocks"], key=_killed_first(pids)))
    assert by_kind["call", survivor] >= 10
    assert by_kind["call", first] >= 3
    # The spans of calls that the killed process had done, but whose reports the coordinator did not get, are lost.
    assert by_kind["call", first] + by_kind["call", replacement] >= 8
    assert all(by_kind["wait for peers", process] for process in (first, replacement, survivor))
    names = {event["name"] for event in profile["traceEvents"] if event["pid"] == 1}
    assert names >= {"repairing", "instance lost", "repaired", "start the instances", "loss"}


def _killed_first(pids: List[int]) -> Callable[[Dict[str, Any]], Any]:
    return lambda each: (each["instance"], each["pid"] != pids[0])


def test_an_instance_that_was_idle_at_the_failure_continues_with_the_replacement(session: Any, tmp_path: Path) -> None:
    plan = plan_for(tmp_path, pod={"num_instances": 2})
    first = dataclasses.replace(plan.next_leg(0), num_updates=3, ends_epoch=False)
    with contextlib.closing(RayFleet(plan)) as fleet:
        fleet.start()
        seed(fleet, None)
        assert list(fleet.run(first, lambda: False))
        send(signal.SIGKILL, 1)(plan)
        assert fleet.repair((1,), may_share_hosts=True) == {0: 3}
        seed(fleet, None, 0, [1])
        then = dataclasses.replace(first, first_update=3)
        assert {report.instance for report in fleet.run(then, lambda: False)} == {0, 1}


def test_two_of_four_are_killed_at_once(session: Any, undisturbed: Outcome, tmp_path: Path) -> None:
    plan = plan_for(tmp_path, pod={"num_instances": 4})
    outcome = run(plan, [(7, send(signal.SIGKILL, 0, 2))])
    assert_undisturbed(plan, outcome, undisturbed)
    assert sorted(lost(outcome)) == [(0, "died"), (2, "died")]
    assert {index for repair in outcome.repairs for index in repair.lost} == {0, 2}
    for survivor in (1, 3):
        assert Path(plan.log_file(survivor)).read_text().count(", pid ") == 1


def test_after_the_loss_of_all_instances_a_damaged_checkpoint_is_skipped(
    session: Any, undisturbed: Outcome, tmp_path: Path
) -> None:
    plan = plan_for(tmp_path, pod={"num_instances": 2}, run={"checkpoint_every": "6 updates"})
    checkpoints = Path(plan.run_dir) / "checkpoints"

    def flip_a_byte_and_kill_all(plan: Plan) -> None:
        assert wait_until(lambda: (checkpoints / "LATEST").read_text() == "update-00000012\n")
        weights = checkpoints / "update-00000012" / "weights.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(bytes(content))
        send(signal.SIGKILL, 0, 1)(plan)

    outcome = run(plan, [(13, flip_a_byte_and_kill_all), (21, send(signal.SIGKILL, 0, 1))])
    assert_undisturbed(plan, outcome, undisturbed)
    first, second = outcome.repairs
    assert first.update == 6
    assert first.seeded_from.endswith("update-00000006")
    (damaged,) = first.passed_over
    assert "update-00000012 is damaged" in damaged
    assert second.update in (12, 18)  # checkpoint 12 was written again
    assert second.passed_over == ()


def test_a_frozen_instance_is_detected_and_replaced(session: Any, undisturbed: Outcome, tmp_path: Path) -> None:
    plan = plan_for(tmp_path, pod={"num_instances": 2}, run={"silent_after_s": 6})
    outcome = run(plan, [(9, send(signal.SIGSTOP, 1))])
    assert_undisturbed(plan, outcome, undisturbed)
    assert 1 in [loss.instance for loss in outcome.losses]
    # If this machine stands still for seconds, the wait of the other instance can be detected as well. Which one is
    # lost, and why, is tested with a scripted clock in tests/fleet/test_ray_watch.py.
    assert {loss.kind for loss in outcome.losses} <= {"silent", "stuck"}, outcome.losses
    assert all("run.silent_after_s = 6" in loss.cause for loss in outcome.losses if loss.kind == "silent")


def test_a_frozen_process_is_killed_but_no_other_process_with_its_pid() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        ticks = process_start_ticks(process.pid)
        assert ticks is not None
        process.send_signal(signal.SIGSTOP)
        kill_process(process.pid, ticks - 1)
        assert process.poll() is None
        kill_process(process.pid, ticks)
        assert process.wait(10) == -signal.SIGKILL
    kill_process(process.pid, ticks)  # it has ended; nothing happens
