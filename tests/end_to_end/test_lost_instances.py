"""Instances on one host that are killed, freeze, fail, or are stuck in user code."""

from __future__ import annotations

import collections
import json
import re
import signal
from pathlib import Path
from typing import Any, List

import pytest

from raypod.events import UpdateDone
from raypod.plan.plan import Plan
from tests.support.bounded import wait_until
from tests.support.faulty_runs import Outcome, assert_undisturbed, pid_of, run, send, starts
from tests.support.fragile_runs import EPOCH, fail, plan_of, run_inline

# Ray's own code leaves sockets and files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")


def test_killed_instances(session: Any, folder: Path, undisturbed: Outcome) -> None:
    """The writer of a checkpoint, then an instance between two epochs, then all with a damaged checkpoint."""
    (folder / "slow-disk").touch()
    # The profile ends after the first fault is repaired.
    plan = plan_of(folder, "killed", checkpoint_every="10 updates", profile="updates 3-18")
    checkpoints = Path(plan.run_dir) / "checkpoints"
    pids: List[int] = []

    def kill_the_writer(plan: Plan) -> None:
        assert wait_until(lambda: any(path.suffix for path in checkpoints.glob("*")))
        assert not (checkpoints / "LATEST").exists()  # the first one is not finished
        pids.extend(pid_of(plan, index) for index in (0, 1))
        send(signal.SIGKILL, 0)(plan)
        (folder / "slow-disk").unlink()

    def damage_a_checkpoint_and_kill_all(plan: Plan) -> None:
        assert wait_until(lambda: (checkpoints / "LATEST").read_text() == "update-00000030\n")
        weights = checkpoints / "update-00000030" / "weights.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(bytes(content))
        send(signal.SIGKILL, 0, 1)(plan)

    last = (EPOCH + 16, damage_a_checkpoint_and_kill_all)
    outcome = run(plan, [(11, kill_the_writer), (EPOCH, send(signal.SIGKILL, 1)), last])
    assert_undisturbed(plan, outcome, undisturbed)
    assert outcome.lost[:2] == [(0, "died"), (1, "died")]
    assert sorted(outcome.lost[2:]) == [(0, "died"), (1, "died")]
    writer, idle, both = outcome.repairs
    assert [each.restarts for each in outcome.repairs[:2]] == [1, 2]
    assert (writer.seeded_from, writer.lost) == ("instance 1", (0,))
    assert (idle.seeded_from, idle.lost, idle.update) == ("instance 0", (1,), EPOCH)
    assert (Path(both.seeded_from).name, both.lost, both.update) == ("update-00000020", (0, 1), EPOCH)
    (damaged,) = both.passed_over
    assert "update-00000030 is damaged" in damaged
    assert starts(plan) == [3, 3]  # a survivor keeps its process
    assert not [path for path in checkpoints.iterdir() if path.suffix], "partial checkpoints are left"
    assert_profile(plan, pids)


def assert_profile(plan: Plan, pids: List[int]) -> None:
    """Assert that the profile has the calls of the killed instance 0, of its replacement, and of instance 1."""
    profile = json.loads((Path(plan.run_dir) / "profile.json").read_text())
    (part,) = profile["metadata"]["parts"]
    assert part["updates"] == [3, 18]
    assert "meet" in part["start_seconds"]
    clocks = {(each["instance"], each["pid"]): each for each in part["clocks"]}
    assert len(clocks) == 3
    for each in part["clocks"]:  # all processes are on one host, whose clock is this one's
        assert abs(each["offset_s"]) <= each["error_s"] < 1
    first, survivor = (clocks.pop((index, pid))["process"] for index, pid in enumerate(pids))
    (replacement,) = (each["process"] for each in clocks.values())
    by_kind = collections.Counter((event.get("cat"), event["pid"]) for event in profile["traceEvents"])
    # The spans of calls that the killed process had done, but whose reports the coordinator did not get, are lost.
    assert by_kind["call", survivor] >= 10
    assert by_kind["call", first] >= 6
    assert all(by_kind["wait for peers", process] for process in (first, survivor))
    assert replacement not in (first, survivor)
    names = {event["name"] for event in profile["traceEvents"] if event["pid"] == 1}
    assert names >= {"repairing", "instance lost", "repaired", "start the instances", "loss"}


def test_frozen_instances(session: Any, folder: Path, undisturbed: Outcome) -> None:
    """During training, then during the pause of Ctrl-C: the survivors wait for its end between two calls."""
    (folder / "slow-data").touch()  # longer than it takes to request a pause
    plan = plan_of(folder, "frozen", silent_after_s=8)

    def freeze_and_interrupt(plan: Plan) -> None:
        send(signal.SIGSTOP, 1)(plan)
        signal.raise_signal(signal.SIGINT)

    outcome = run(plan, [(4, send(signal.SIGSTOP, 1)), (8, freeze_and_interrupt)])
    (folder / "slow-data").unlink()
    assert outcome.lost == [(1, "silent")] * 2, outcome.losses
    assert all("run.silent_after_s = 8" in loss.cause for loss in outcome.losses)
    assert starts(plan) == [1, 3]
    done = outcome.ended.updates
    assert (outcome.ended.interrupted, outcome.updates) == (True, list(range(1, done + 1)))
    metrics = [(event.update, event.metrics) for event in outcome.of(UpdateDone)]
    assert metrics == [(event.update, event.metrics) for event in undisturbed.of(UpdateDone)][:done]
    assert outcome.ended.checkpoint is not None
    assert outcome.sha256 == run_inline(folder, "interrupted", done).sha256


def test_user_code_that_fails_or_never_returns(session: Any, folder: Path, undisturbed: Outcome) -> None:
    # The second limits the first call, too, which takes long on a loaded machine.
    plan = plan_of(folder, "stuck", stuck_after_s=3, report_timeout_s=30)
    outcome = run(plan, [(4, fail(folder, "model-raises")), (9, fail(folder, "loader-hangs"))])
    assert_undisturbed(plan, outcome, undisturbed)
    assert outcome.lost == [(1, "raised"), (1, "stuck")]
    raised, hangs = outcome.losses
    assert re.fullmatch(r"ValueError: no such layer \(fragile\.py:\d+, in forward\)", raised.cause)
    assert "stuck: loading data" in hangs.cause
    assert "_hang_in_user_code" in hangs.stack
    assert [repair.restarts for repair in outcome.repairs] == [1, 2]
    assert {repair.seeded_from for repair in outcome.repairs} == {"instance 0"}
