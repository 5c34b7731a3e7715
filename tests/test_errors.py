from __future__ import annotations

import pickle

import pytest

from raypod import errors
from raypod.fleet.base import FleetBroken


def every_class(base: type = errors.RaypodError) -> list[type]:
    return [base, *(each for child in base.__subclasses__() for each in every_class(child))]


EXAMPLES = {
    errors.InstanceFailed: errors.InstanceFailed(3, "h1", "it died", "logs/instance-3.log"),
    errors.FunctionFailed: errors.FunctionFailed(3, "h1", "ValueError: x", "", "Traceback"),
    errors.ProgramFailed: errors.ProgramFailed(3, "h1", "exit code 4", "logs/instance-3.log", 4),
    FleetBroken: FleetBroken((), "rank 1 has lost rank 0"),
    errors.CollectiveBroken: errors.CollectiveBroken(1, "the barrier: lost the connection"),
    errors.HostLost: errors.HostLost("h1", (2, 3), "no answer", "logs"),
    errors.PeerLost: errors.PeerLost(1, "h2", 0, "h1", "it closed the connection"),
    errors.WaitTimedOut: errors.WaitTimedOut("the actors", 5.0, "run.start_timeout_s"),
    errors.CheckpointDamaged: errors.CheckpointDamaged("checkpoints/update-00000044", "it ends too early"),
    errors.CheckpointNotSaved: errors.CheckpointNotSaved("checkpoints/update-00000044", "No space left", "make room"),
    errors.LossNotFinite: errors.LossNotFinite(float("inf"), 43, 44, "go on from update-00000022"),
    errors.WeightsDiffer: errors.WeightsDiffer({0: "aa", 1: "bb"}),
    errors.LeaseHeld: errors.LeaseHeld("runs/a", "pid 7 on host h1", "--take-over ends it"),
    errors.LeaseLost: errors.LeaseLost("runs/a", "pid 8 on host h2"),
}


@pytest.mark.parametrize("kind", every_class(), ids=lambda kind: kind.__name__)
def test_every_error_can_be_pickled(kind: type) -> None:
    error = EXAMPLES.get(kind) or kind("what happened")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (kind, str(error), vars(error))


@pytest.mark.parametrize("kind", every_class(), ids=lambda kind: kind.__name__)
def test_user_errors_exit_with_2_and_run_errors_with_1(kind: type) -> None:
    if kind is errors.ProgramFailed:
        assert EXAMPLES[kind].exit_code == 4  # that of the program
        return
    assert kind.exit_code == (2 if issubclass(kind, errors.UserError) else 1)


def test_the_message_names_instance_host_cause_and_log() -> None:
    assert str(EXAMPLES[errors.InstanceFailed]) == (
        "instance 3 on host h1 failed: it died; its log: logs/instance-3.log"
    )


def test_an_exception_is_summarized_in_one_line_with_its_class() -> None:
    assert errors.summarize_exception(ValueError("no sample\n  7")) == "ValueError: no sample 7"
    assert errors.summarize_exception(pickle.PicklingError("x")) == "_pickle.PicklingError: x"


def test_an_exception_of_a_loader_worker_is_summarized_without_its_traceback() -> None:
    text = "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File x\n"
    assert errors.summarize_exception(ValueError(f"{text}ValueError: no sample 7\n")) == (
        "ValueError: no sample 7 (in DataLoader worker process 0)"
    )
