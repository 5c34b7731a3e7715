"""The training step, optimizers and learning rates."""

from __future__ import annotations

from typing import Any

import poptorch
import pytest
import torch
from torch import nn
from torch.nn import functional

from raypod.model import program
from raypod.plan.config import Config
from raypod.plan.resolve import from_values
from raypod.tasks.registry import facts_of, task_of


def config(**training: object) -> Config:
    return from_values({"training": training})


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_training_step_has_the_loss_and_gradients_of_torch(smoothing: float) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    images, labels = torch.randn(4, 3, 2, 2), torch.tensor([0, 4, 2, 2])
    expected = functional.cross_entropy(network(images), labels, label_smoothing=smoothing)
    expected.backward()
    wanted = {
        name: parameter.grad.clone() for name, parameter in network.named_parameters() if parameter.grad is not None
    }
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    configured = config(label_smoothing=smoothing)
    step = program.TrainingStep(task_of(configured), facts_of(configured).metrics, network, nn.Identity())
    trained = poptorch.trainingModel(step, optimizer=poptorch.optim.SGD(network.parameters(), lr=1.0))
    loss, _ = trained(images, labels)
    torch.testing.assert_close(loss, expected.detach())
    after = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    trained.destroy()
    for name, gradient in wanted.items():
        torch.testing.assert_close(before[name] - after[name], gradient)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lamb"])
@pytest.mark.parametrize(("precision", "dtype"), [("16.16", torch.float16), ("16.32", torch.float32)])
def test_optimizer_states_have_the_precision_of_the_weights_except_second_moments(
    name: str, precision: str, dtype: torch.dtype
) -> None:
    optimizer: Any = program.build_optimizer(
        config(optimizer=name, precision=precision), [{"params": nn.Linear(2, 2).parameters()}]
    )
    assert type(optimizer).__name__.lower() == name
    assert optimizer.accum_type == dtype
    if name == "sgd":
        assert optimizer.velocity_accum_type == dtype
    else:
        assert optimizer.first_order_momentum_accum_type == dtype
        assert optimizer.second_order_momentum_accum_type == torch.float32
