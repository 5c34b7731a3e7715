"""The results of a run depend on its replicas, not on the processes that hold them."""

from __future__ import annotations

import poptorch
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
