"""The results of a run do not depend on the number of processes; a failed process ends the others."""

from __future__ import annotations

import poptorch
import pytest
import torch

from tests.support.poptorch_models import batch, options, seeded


def trained(process, processes, replicas=4):
    """Return the weights' bytes after training a classifier with dropout on 4 replicas in total."""
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


def test_weights_have_the_same_bits_in_one_and_two_processes(ranks):
    before = torch.get_num_threads()
    alone = trained(0, 1)
    torch.set_num_threads(before)
    assert ranks(__file__, ["trained"], 2)["trained"] == [alone, alone]


class Fragile(torch.nn.Module):
    """Raises an error for negative inputs."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        if x.min() < 0:
            raise ArithmeticError("a negative number")
        return poptorch.identity_loss(self.weight * x, "mean")


def fails_in_second_call(process, processes):
    """Return the error in each process if a replica of process 1 fails in the second call."""
    model = Fragile()
    opts = options()
    opts.Distributed.configureProcessId(process, processes)
    training = poptorch.trainingModel(model, opts)
    training(torch.ones(1))
    try:
        training(torch.full((1,), -1.0 if process else 1.0))
    except (ArithmeticError, RuntimeError) as error:
        return str(error)
    return "no error"


def fails_in_first_call(process, processes):
    """The same in the first call, before the processes are connected."""
    model = Fragile()
    opts = options(iterations=2)
    opts.Distributed.configureProcessId(process, processes)
    training = poptorch.trainingModel(model, opts)
    try:
        training(torch.tensor([1.0, 1.0]) if process == 0 else torch.tensor([1.0, -1.0]))
    except (ArithmeticError, RuntimeError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("case", ["fails_in_second_call", "fails_in_first_call"])
def test_failure_in_one_process_ends_the_other(case, ranks):
    peer, failed = ranks(__file__, [case], 2)[case]
    assert failed == "a negative number"
    assert "lost the connection" in peer or "cannot be used" in peer or "failed before it joined" in peer
