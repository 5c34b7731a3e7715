"""The policy of repairs: what happened, and what is done about it."""

from __future__ import annotations

from typing import Optional

import pytest

from raypod.coordinator.recovery import REFILL_S, FailurePolicy, newest, receivers
from raypod.errors import InstanceFailed
from raypod.events import InstanceLost
from raypod.fleet.base import FleetBroken
from raypod.fleet.ray_watch import in_short


def lost(instance: int, kind: str = "died", cause: str = "its process died") -> InstanceLost:
    return InstanceLost(instance, f"h{instance}", kind, cause, "in call 3", "", f"instance-{instance}.log")  # type: ignore[arg-type]


def broken(*losses: InstanceLost) -> FleetBroken:
    return FleetBroken(losses, "instance 0 has lost others: the barrier")


def test_the_lost_are_replaced_in_order() -> None:
    decision = FailurePolicy("emulated", 3).decide(broken(lost(2), lost(0)), 10, 0.0)
    assert (decision.replace, decision.may_share_hosts, decision.give_up) == ((0, 2), True, None)
    assert not FailurePolicy("ipu", 3).decide(broken(lost(1)), 10, 0.0).may_share_hosts


def test_instances_that_lost_each_other_meet_anew() -> None:
    assert FailurePolicy("ipu", 1).decide(broken(), 10, 0.0).replace == ()


def test_the_budget_ends_with_the_first_cause() -> None:
    policy = FailurePolicy("emulated", 2)
    for instance in (0, 1):
        assert policy.decide(broken(lost(instance)), instance, 0.0).give_up is None
    error = policy.decide(broken(lost(2, "silent", "silent for 16 s"), lost(0)), 5, 0.0).give_up
    assert isinstance(error, InstanceFailed)
    assert (error.instance, error.host, policy.restarts) == (2, "h2", 2)
    assert str(error).startswith("instance 2 on host h2 failed: silent for 16 s (not repaired, as --max-restarts 2 is")
    assert "the first failure was: instance 0 on host h0 failed" in str(error)


def test_a_failure_that_was_the_first_one_is_told_once() -> None:
    policy = FailurePolicy("emulated", 1)
    policy.decide(broken(lost(0)), 1, 0.0)
    error = str(policy.decide(broken(lost(0)), 2, 0.0).give_up)
    assert error.endswith("is spent; the first failure was the same); its log: instance-0.log")


def test_what_a_loaders_worker_raised_is_told_without_its_traceback() -> None:
    told = "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File x\n"
    assert in_short(ValueError(f"{told}ValueError: no sample 7\n")) == (
        "ValueError: no sample 7 (in DataLoader worker process 0)"
    )
    assert in_short(ValueError("no sample 7")) == "ValueError: no sample 7"


def test_without_a_budget_the_error_is_the_cause_alone() -> None:
    error = FailurePolicy("emulated", 0).decide(broken(lost(1)), 5, 0.0).give_up
    assert str(error) == "instance 1 on host h1 failed: its process died; its log: instance-1.log"
    assert "lost each other" in str(FailurePolicy("emulated", 0).decide(broken(), 5, 0.0).give_up)


@pytest.mark.parametrize(("later_s", "is_over"), [(REFILL_S - 1, True), (REFILL_S, False)])
def test_an_hour_of_progress_refills_the_budget(later_s: float, is_over: bool) -> None:
    policy = FailurePolicy("emulated", 1)
    policy.decide(broken(lost(0)), 1, 100.0)
    assert (policy.decide(broken(lost(0)), 900, 100.0 + later_s).give_up is not None) is is_over


def test_the_same_exception_at_the_same_update_is_not_tried_a_third_time() -> None:
    policy = FailurePolicy("emulated", 9)
    raised = broken(lost(1, "raised", "ValueError: no such layer"))
    assert policy.decide(raised, 7, 0.0).give_up is None
    assert policy.decide(raised, 8, 0.0).give_up is None
    assert policy.decide(broken(lost(1, "raised", "OSError: no disk")), 8, 0.0).give_up is None
    assert "ValueError: no such layer (the same happened at update 8 before)" in str(
        policy.decide(raised, 8, 0.0).give_up
    )
    assert FailurePolicy("emulated", 9).decide(broken(lost(1)), 8, 0.0).give_up is None  # a death may come again


@pytest.mark.parametrize(
    ("positions", "root", "receiving"),
    [
        ({0: 5, 1: 6, 3: 6}, 1, [0, 2]),
        ({0: 6, 1: 6}, 0, [2, 3]),
        ({2: 0}, 2, [0, 1, 3]),
        ({0: -1, 1: -1}, None, []),
        ({}, None, []),
    ],
)
def test_the_newest_survivor_seeds_who_is_behind(
    positions: dict[int, int], root: Optional[int], receiving: list[int]
) -> None:
    assert newest(positions) == root
    if root is not None:
        assert receivers(positions, root, 4) == receiving
