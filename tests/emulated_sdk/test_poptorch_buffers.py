"""A buffer that forward updates with a value of the graph is state: a leaf in each micro-batch."""

from __future__ import annotations

import poptorch
import pytest
import torch
from torch import nn

from tests.support.poptorch_models import options, seeded, wrapped

UPDATES = {
    "copy_": lambda state, index, y: state.copy_(y),
    "index_put_": lambda state, index, y: state.index_put_((index,), y),
    "setitem": lambda state, index, y: state.__setitem__(index, y),
    "mul_add_": lambda state, index, y: state.mul_(0.5).add_(y),
    "scatter_": lambda state, index, y: state.scatter_(0, index[:, None].expand(3, 2), y),
}


class Memory(nn.Module):
    def __init__(self, update):
        super().__init__()
        self.layer, self.update = nn.Linear(2, 2), update
        self.register_buffer("state", torch.zeros(3, 2))

    def forward(self, x, index):
        y = torch.tanh(self.layer(x + self.state[index]))
        self.update(self.state, index, y)
        return poptorch.identity_loss((y**2).sum() + self.state.sum(), "none")


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_buffer_with_a_graph_is_a_leaf_in_each_micro_batch(update, accumulation):
    model, reference = seeded(Memory, update=update), seeded(Memory, update=update)
    index = torch.tensor([2, 0, 1] * accumulation)
    training = wrapped(model, options(accumulation=accumulation), lr=0.1)
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    for step in range(3):
        x = torch.full((3 * accumulation, 2), 0.25 * (step + 1))
        training(x, index)
        optimizer.zero_grad()
        for part, where in zip(x.chunk(accumulation), index.chunk(accumulation)):
            (reference(part, where) / accumulation).backward()
            reference.state.detach_()
        optimizer.step()
    assert torch.allclose(model.state, reference.state, atol=1e-6)
    assert torch.allclose(model.layer.weight, reference.layer.weight, atol=1e-6)
