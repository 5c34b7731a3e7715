"""A model with several ops trains to the same bits as the equivalent model in plain torch."""

from __future__ import annotations

from typing import Any

import poptorch
import pytest
import torch
from torch import nn

from tests.support.poptorch_models import options


class Plain(nn.Module):
    """Two convolutions, a linear layer, a scale, a product, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left = nn.Conv1d(1, 2, 3, padding=1)
        self.right = nn.Conv1d(1, 2, 3, padding=1)
        self.linear = nn.Linear(8, 8)
        self.scales = nn.Parameter(torch.tensor([1.5, 0.5]))
        self.head = nn.Parameter(torch.randn(8, 4))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(self.left(x) + self.right(x)))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.features(x)
        y = y * self.scales[0]
        y = torch.cat([y[:, :, :2], y[:, :, 2:6] * 2, y[:, :, 6:]], 2)
        return poptorch.identity_loss((y @ self.head).square(), "mean")


class WithOps(Plain):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        with poptorch.MultiConv().planType(poptorch.MultiConvPlanType.Serial):
            y = poptorch.nop(self.left(x)) + self.right(x)
        with poptorch.NameScope("linear"):
            return torch.tanh(self.linear(y))

    def forward(self, x: torch.Tensor) -> Any:
        y = poptorch.recomputationCheckpoint(self.features(x)) * self.scales[0]
        start = torch.tensor(2)
        y = poptorch.dynamic_update(y, poptorch.dynamic_slice(y, 2, start, 4, 1) * 2, 2, start, 4)
        reducing = poptorch.MatMulSerializationMode.ReducingDim
        product = poptorch.set_available_memory(poptorch.serializedMatMul(y, self.head, reducing, 4), 0.3)
        return poptorch.identity_loss(product.square(), "mean")


@pytest.mark.parametrize(("replicas", "accumulation", "iterations"), [(1, 1, 1), (2, 2, 2), (4, 1, 1)])
def test_training_equals_plain_torch(replicas, accumulation, iterations):
    samples = 2 * replicas * accumulation * iterations
    x = torch.randn(samples, 1, 8, generator=torch.Generator().manual_seed(1))
    trained = []
    for model in (Plain(), WithOps()):
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        training = poptorch.trainingModel(model, options(replicas, accumulation, iterations), optimizer)
        losses = [training(x) for _ in range(3)]
        trained.append((losses[-1], [parameter.detach().clone() for parameter in model.parameters()]))
    (plain_loss, plain), (loss, weights) = trained
    assert torch.equal(plain_loss, loss)
    assert all(torch.equal(*pair) for pair in zip(plain, weights))
