"""Several processes: the same results as one, and a failed call or a lost process, which changes no state."""

from __future__ import annotations

import functools
import os
import tempfile
from typing import Any, Callable, Dict, List, Tuple

import _pod.board
import _pod.wires
import poptorch
import pytest
import torch
from poptorch.device.execute import calls

from tests.support.poptorch_models import Apply, Classifier, batch, options, seeded, wrapped
from tests.support.ranks import error_of, run_ranks
from tests.support.refused import rejects

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


def fragile_training(rank: int = 0, size: int = 1, iterations: int = ITERATIONS) -> Any:
    opts = options(REPLICAS // size, iterations=iterations).randomSeed(3)
    opts.Distributed.configureProcessId(rank, size)
    return wrapped(seeded(FailsOnBadSample), opts, momentum=0.9)


def share(call: int, rank: int = 0, size: int = 1) -> List[torch.Tensor]:
    """Return the inputs of a process: [iteration, replica, 2]."""
    mine = slice(rank * REPLICAS // size, (rank + 1) * REPLICAS // size)
    inputs = batch(ITERATIONS * REPLICAS * 2, seed=call)
    each = [tensor.view(ITERATIONS, REPLICAS, 2, *tensor.shape[1:])[:, mine].flatten(0, 2) for tensor in inputs]
    return [tensor.contiguous() for tensor in each]


def with_bad_sample(samples: List[torch.Tensor]) -> List[torch.Tensor]:
    images = samples[0].clone()
    images[-1] = BAD
    return [images, samples[1]]


def state_of(training: Any) -> Dict[str, torch.Tensor]:
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
    training = fragile_training(rank, size)
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
    training = fragile_training()
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
    training = fragile_training(iterations=iterations)
    half = [tensor[: len(tensor) * iterations // ITERATIONS] for tensor in share(0)]
    training(*half)
    before = state_of(training)
    rejects(ValueError, "this sample is bad", lambda: training(*with_bad_sample(half)))
    assert_same(state_of(training), before)


class NarrowForLarge(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        output = self.linear(x)
        loss = poptorch.identity_loss(output.sum(), "none")
        return (output[:, :1] if (x > 50).any() else output), loss


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (99.0, r"Output number 0 has micro-batches of different shapes.*\[1\] and \[2\]"),
        (1e30, "'linear.weight' has NaN"),
    ],
)
def test_a_call_whose_outputs_or_new_weights_are_refused_changes_nothing(bad: float, words: str) -> None:
    opts = options(accumulation=2).outputMode(poptorch.OutputMode.All)
    opts.Precision.enableFloatingPointExceptions(True)
    model = NarrowForLarge()
    training = poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=1e30))
    training(torch.zeros(2, 2))
    training.copyWeightsToHost()
    before = model.linear.weight.clone()
    x = torch.full((2, 2), bad) if bad > 1e20 else torch.tensor([[0.0, 0.0], [bad, bad]])
    rejects(poptorch.Error, words, training, x)
    training.copyWeightsToHost()
    assert torch.equal(model.linear.weight, before)


def test_another_program_continues_from_the_replica_state_and_one_of_another_shape_is_rejected(
    single_process: Dict[str, torch.Tensor],
) -> None:
    first, second = fragile_training(), fragile_training()
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
    training = fragile_training()
    training(*share(0))
    state = training.emulatedReplicaState()
    fewer = {"buffers": {name: value[:2] for name, value in state["buffers"].items()}, "rng_state": [0, 0]}
    rejects(poptorch.Error, r"'table' is \(2, 3\), but \(4, 3\) is expected", training.loadEmulatedReplicaState, fewer)
    del state["buffers"]["table"]
    rejects(poptorch.Error, r"'table' is missing, but \(4, 3\) is expected", training.loadEmulatedReplicaState, state)


def train_classifier(process, processes, replicas=4):
    torch.set_num_threads(1)
    model = seeded(dropout=0.3)
    local = replicas // processes
    opts = options(local, accumulation=2).randomSeed(3)
    opts.Distributed.configureProcessId(process, processes)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, max_grad_norm=0.5)
    training = poptorch.trainingModel(model, opts, optimizer)
    for update in range(3):
        images, labels = batch(2 * replicas * 3, update)
        # [accumulation, replica, micro-batch]: each process has its replicas' share of every accumulation step.
        mine = slice(process * local, (process + 1) * local)
        shares = [x.view(2, replicas, 3, *x.shape[1:])[:, mine].reshape(-1, *x.shape[1:]) for x in (images, labels)]
        training(*shares)
    return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())


def fragile(x):
    if x.min() < 0:
        raise ValueError("a negative number")
    return x


def fails_in_first_call(process, processes):
    opts = options(iterations=2)
    opts.Distributed.configureProcessId(process, processes)
    forward = lambda model, x: poptorch.identity_loss(model.weight * fragile(x), "mean")  # noqa: E731
    training = poptorch.trainingModel(Apply(forward, weight=torch.nn.Parameter(torch.ones(()))), opts)
    return error_of(lambda: training(torch.tensor([1.0, -1.0 if process else 1.0])))


def test_two_processes_have_the_bits_of_one_and_the_failure_of_one_ends_the_other(ranks):
    before = torch.get_num_threads()
    alone = train_classifier(0, 1)
    torch.set_num_threads(before)
    assert ranks(__file__, ["train_classifier"], 2)["train_classifier"] == [alone, alone]
    peer, failed = ranks(__file__, ["fails_in_first_call"], 2)["fails_in_first_call"]
    assert failed == "ValueError: a negative number"
    assert "lost the connection" in peer or "cannot be used" in peer or "failed before it joined" in peer


USABLE, BROKEN = "no error", "Error: Application runtime error: the device is in an error state"


def survivor(fault: str, process: int, processes: int) -> Dict[str, Any]:
    """Return how a call ends in which the other process is lost, and how the device can be used afterwards."""
    opts = options()
    opts.Distributed.configureProcessId(process, processes)
    training = wrapped(seeded(Classifier), opts)
    training(*batch(1))
    if process:
        return {}
    os.environ.update({calls.FAULT_VARIABLE: fault, "EMULATED_POD_TIMEOUT_S": "0.1"})
    try:
        training(*batch(1))
    except (RuntimeError, poptorch.Error) as error:
        raised = error
    uses: List[Callable[[], Any]] = [
        lambda: training._optimizer.state_dict(),
        *(training.copyWeightsToHostIfNeeded, training.detachFromDevice, training.attachToDevice),
    ]
    action = getattr(raised, "recovery_action", "")
    return {"raised": type(raised).__name__, "action": action, "uses": [error_of_use(each) for each in uses]}


def error_of_use(use: Callable[[], Any]) -> str:
    try:
        use()
    except poptorch.Error as error:
        return f"Error: {error}"
    return USABLE


nothing, raises, unusable, unrecoverable, hangs = (
    functools.partial(survivor, fault) for fault in ("", "raise:LINK_RESET", "unusable", "unrecoverable", "hang")
)


def unusable_by_a_file(process: int, processes: int) -> Any:
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("unusable\n")
        file.flush()
        return survivor(f"@{file.name}", process, processes)


@pytest.mark.parametrize(
    ("case", "raised", "action", "is_usable"),
    [
        ("raises", "RecoverableError", "LINK_RESET", True),
        ("unusable", "RecoverableError", "IPU_RESET", False),
        ("unusable_by_a_file", "RecoverableError", "IPU_RESET", False),
        ("unrecoverable", "UnrecoverableError", "", False),
        ("hangs", "Error", "", True),
        ("nothing", "PeerFailed", "", True),
    ],
)
def test_the_loss_of_a_process_ends_the_call_of_the_other(ranks, case, raised, action, is_usable):
    found = ranks(__file__, [case], 2)[case][0]
    assert (found["raised"], found["action"]) == (raised, action)
    assert found["uses"] == [USABLE if is_usable else BROKEN] * 4


def test_an_unknown_fault_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("raises", "hang:IPU_RESET", "raise:", "unusable:RESET"):
        monkeypatch.setenv(calls.FAULT_VARIABLE, text)
        model = poptorch.inferenceModel(torch.nn.Linear(2, 2))
        message = f"EMULATED_POD_DEVICE_FAULT={text}: must be raise, unusable, unrecov"
        rejects(poptorch.Error, message, model, torch.ones(1, 2))
