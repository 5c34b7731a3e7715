"""The results of a run depend on its replicas, not on the processes that hold them."""

from __future__ import annotations

import time

import poptorch
import pytest
import torch
from poptorch_models import batch, options, seeded
from ranks import run_ranks


def trained(process, processes, replicas=4):
    """The weights' bytes after training a classifier with dropout on 4 replicas in all."""
    torch.set_num_threads(1)
    model = seeded(dropout=0.3)
    local = replicas // processes
    opts = options(local, accumulation=2).randomSeed(3)
    opts.Distributed.configureProcessId(process, processes)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, max_grad_norm=0.5)
    training = poptorch.trainingModel(model, opts, optimizer)
    for update in range(3):
        images, labels = batch(2 * replicas * 3, update)
        # [accumulation, replica, micro-batch]: every process takes its replicas' share of each accumulation step.
        mine = slice(process * local, (process + 1) * local)
        shares = [x.view(2, replicas, 3, *x.shape[1:])[:, mine].reshape(-1, *x.shape[1:]) for x in (images, labels)]
        training(*shares)
    return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())


def test_weights_are_the_same_bits_in_one_and_in_two_processes():
    before = torch.get_num_threads()
    alone = trained(0, 1)
    torch.set_num_threads(before)
    assert run_ranks(__file__, ["trained"], 2)["trained"] == [alone, alone]


class Fragile(torch.nn.Module):
    """Fails where it meets a negative number."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        if x.min() < 0:
            raise ArithmeticError("a negative number")
        return poptorch.identity_loss(self.weight * x, "mean")


def one_fails(process, processes):
    """What a process sees when another's replica fails in its second call, and how long that takes."""
    model = Fragile()
    opts = options()
    opts.Distributed.configureProcessId(process, processes)
    training = poptorch.trainingModel(model, opts)
    training(torch.ones(1))
    began = time.monotonic()
    try:
        training(torch.full((1,), -1.0 if process else 1.0))
    except (ArithmeticError, RuntimeError) as error:
        return str(error), time.monotonic() - began
    return "nothing", 0.0


def one_fails_at_once(process, processes):
    """The same in the first call, before the processes have met."""
    model = Fragile()
    opts = options(iterations=2)
    opts.Distributed.configureProcessId(process, processes)
    training = poptorch.trainingModel(model, opts)
    began = time.monotonic()
    try:
        training(torch.tensor([1.0, 1.0]) if process == 0 else torch.tensor([1.0, -1.0]))
    except (ArithmeticError, RuntimeError) as error:
        return str(error), time.monotonic() - began
    return "nothing", 0.0


@pytest.mark.parametrize("case", ["one_fails", "one_fails_at_once"])
def test_a_failure_in_one_process_ends_the_others_wait(case):
    (peer, waited_s), (failed, _) = run_ranks(__file__, [case], 2)[case]
    assert failed == "a negative number"
    assert "lost the connection" in peer or "cannot be used" in peer or "failed before it joined" in peer
    assert waited_s < 15
