"""A failed call of training changes no state, and every process has the state of all replicas."""

from __future__ import annotations

import os
from typing import Any, Dict, List

import _pod.board
import _pod.wires
import poptorch
import pytest
import torch

from tests.support.poptorch_models import Classifier, batch, options, seeded
from tests.support.poptorch_models import wrapped as training_of
from tests.support.ranks import run_ranks

REPLICAS, ITERATIONS, CALLS, FAILING_CALL = 4, 2, 4, 2
BAD = 1e6


class FailsOnBadSample(Classifier):
    """Raises for a bad sample after the running statistics have changed."""

    def __init__(self) -> None:
        super().__init__(dropout=0.25)
        self.register_buffer("table", torch.ones(3))  # never changed

    def forward(self, images: torch.Tensor, labels: Any = None) -> Any:
        found = super().forward(images, labels)
        if images.max() == BAD:
            raise ValueError("this sample is bad")
        return found


def wrapped(rank: int = 0, size: int = 1, iterations: int = ITERATIONS) -> Any:
    opts = options(REPLICAS // size, iterations=iterations).randomSeed(3)
    opts.Distributed.configureProcessId(rank, size)
    return training_of(seeded(FailsOnBadSample), opts, momentum=0.9)


def share(call: int, rank: int = 0, size: int = 1) -> List[torch.Tensor]:
    """Return the inputs of a process: [iteration, replica, 2]."""
    mine = slice(rank * REPLICAS // size, (rank + 1) * REPLICAS // size)
    inputs = batch(ITERATIONS * REPLICAS * 2, seed=call)
    each = [tensor.view(ITERATIONS, REPLICAS, 2, *tensor.shape[1:])[:, mine].flatten(0, 2) for tensor in inputs]
    return [tensor.contiguous() for tensor in each]


def with_bad_sample(samples: List[torch.Tensor]) -> List[torch.Tensor]:
    """Make the last sample of the last iteration a bad one."""
    images = samples[0].clone()
    images[-1] = BAD
    return [images, samples[1]]


def state_of(training: Any) -> Dict[str, torch.Tensor]:
    """Return the complete state of a run, by name."""
    replicas = training.emulatedReplicaState()
    optimizer = training._optimizer.state_dict()["ipu_state"]
    weights = {name: value.clone() for name, value in training.model.state_dict().items() if "norm.r" not in name}
    found = {f"weight {name}": value for name, value in weights.items()}
    found.update({f"optimizer {name}": value for name, value in optimizer.items()})
    found.update({f"buffer {name}": value for name, value in replicas["buffers"].items()})
    found["random"] = torch.tensor(replicas["rng_state"])
    return found


def assert_same(ours: Dict[str, torch.Tensor], theirs: Dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]


def _train_with_failure(rank: int, size: int, generation: str) -> Dict[str, Any]:
    os.environ[_pod.wires.GENERATION] = generation
    training = wrapped(rank, size)
    for call in range(CALLS):
        samples = share(call, rank, size)
        if call == FAILING_CALL:
            before = state_of(training)
            try:
                training(*(with_bad_sample(samples) if rank == size - 1 else samples))
                error = ""
            except (RuntimeError, ValueError) as caught:
                error = str(caught)
            after = state_of(training)
            replicas = training.emulatedReplicaState()
            training.detachFromDevice()
            os.environ[_pod.wires.GENERATION] = generation + "-again"
            training.loadEmulatedReplicaState(replicas)
        training(*samples)
    used_board = training._program._update._sum.uses_board()
    return {"before": before, "after": after, "error": error, "end": state_of(training), "board": used_board}


def with_shared_memory(rank: int, size: int) -> Dict[str, Any]:
    return _train_with_failure(rank, size, "board")


def with_network(rank: int, size: int) -> Dict[str, Any]:
    before = _pod.board.is_possible
    _pod.board.is_possible = lambda capabilities: False
    try:
        return _train_with_failure(rank, size, "wires")
    finally:
        _pod.board.is_possible = before


@pytest.fixture(scope="module")
def single_process() -> Dict[str, torch.Tensor]:
    """Return the state of the same training in one process."""
    training = wrapped()
    for call in range(CALLS):
        training(*share(call))
    return state_of(training)


def test_a_lost_peer_changes_nothing_and_training_continues_after_attaching(
    processes: None, single_process: Any
) -> None:
    found = run_ranks(__file__, ["with_shared_memory", "with_network"], 2)
    for transport, (survivor, failed) in found.items():
        assert survivor["board"] == failed["board"] == (transport == "with_shared_memory")
        assert "this sample is bad" in failed["error"]
        assert "lost the connection" in survivor["error"]
        for each in (survivor, failed):  # each process has the statistics of all four replicas
            assert_same(each["before"], each["after"])
            assert_same(each["end"], single_process)


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_failed_call_changes_nothing(iterations: int) -> None:
    training = wrapped(iterations=iterations)
    half = [tensor[: len(tensor) * iterations // ITERATIONS] for tensor in share(0)]
    training(*half)
    before = state_of(training)
    with pytest.raises(ValueError, match="this sample is bad"):
        training(*with_bad_sample(half))
    assert_same(state_of(training), before)


def test_another_program_continues_from_the_replica_state(single_process: Dict[str, torch.Tensor]) -> None:
    first, second = wrapped(), wrapped()
    for call in range(2):
        first(*share(call))
    first.copyWeightsToHost()
    second.model.load_state_dict(first.model.state_dict())
    second._optimizer.load_state_dict(first._optimizer.state_dict())
    second.loadEmulatedReplicaState(first.emulatedReplicaState())  # before compilation
    for call in range(2, CALLS):
        second(*share(call))
    assert_same(state_of(second), single_process)
    assert len(torch.unique(single_process["buffer norm.running_mean"], dim=0)) == REPLICAS


def test_a_replica_state_of_another_shape_is_rejected() -> None:
    training = wrapped()
    training(*share(0))
    state = training.emulatedReplicaState()
    fewer = {"buffers": {name: value[:2] for name, value in state["buffers"].items()}, "rng_state": [0, 0]}
    with pytest.raises(poptorch.Error, match=r"'table' is \(2, 3\), but \(4, 3\) is expected"):
        training.loadEmulatedReplicaState(fewer)
    del state["buffers"]["table"]
    with pytest.raises(poptorch.Error, match=r"'table' is missing, but \(4, 3\) is expected"):
        training.loadEmulatedReplicaState(state)
