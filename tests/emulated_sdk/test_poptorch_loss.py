"""Losses of training: marking, and exactly one final loss."""

from __future__ import annotations

import poptorch
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.poptorch_models import Apply, options, trained


def with_loss(loss):
    """Return a model that applies a function to the input, scaled by 2, and a target."""
    return Apply(lambda model, x, y: loss(model.weight * x, y), weight=nn.Parameter(torch.tensor([2.0])))


def step_of(loss):
    """Return by how much one update with a learning rate of 0.1 lowers the weight of 2, for a target of 0."""
    return 2 - trained(with_loss(loss), torch.ones(2), torch.zeros(2)).weight.item()


@pytest.mark.parametrize(
    ("loss", "gradient"),
    [
        (F.mse_loss, 4),
        (nn.MSELoss(), 4),
        (lambda p, y: F.mse_loss(p, y) * 10, 4),  # gradients start at the marked loss and not at the output
        (lambda p, y: F.mse_loss(p, y).mul_(10), 4),
        (lambda p, y: (p, F.mse_loss(p, y))[0], 4),  # a loss does not have to be returned
        (lambda p, y: poptorch.identity_loss(F.mse_loss(p, y) * 0.5, "none"), 2),
        (lambda p, y: poptorch.identity_loss(F.mse_loss(p, y) + F.l1_loss(p, y), "sum"), 4 + 1),
        (F.l1_loss, 1),
        (F.smooth_l1_loss, 1),
        (F.huber_loss, 1),
        (F.binary_cross_entropy_with_logits, torch.tensor(2.0).sigmoid().item()),
    ],
)
def test_gradients_start_at_the_marked_loss(loss, gradient):
    assert step_of(loss) == pytest.approx(0.1 * gradient)


def test_a_forward_has_one_independent_marked_loss():
    with pytest.raises(poptorch.Error, match=r"Couldn't find a loss in graph!"):
        step_of(lambda p, y: ((p - y) ** 2).mean())
    with pytest.raises(
        poptorch.Error, match=r"Multiple independent losses found in graph\. Graph must have one final loss\. Wrap"
    ):
        step_of(lambda p, y: (F.mse_loss(p, y), F.l1_loss(p, y)))
    inference = poptorch.inferenceModel(with_loss(lambda p, y: poptorch.identity_loss(p, "mean")), options())
    assert inference(torch.ones(2), torch.ones(2)).item() == 2


def test_a_final_loss_of_several_numbers_is_rejected():
    with pytest.raises(poptorch.Error, match="reduce it to one number"):
        step_of(lambda p, y: F.mse_loss(p, y, reduction="none"))


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 6.0), ("mean", 2.0), ("none", [1.0, 2.0, 3.0])])
def test_identity_loss_on_the_host_is_the_plain_reduction(reduction, expected):
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    loss = poptorch.identity_loss(x, reduction)
    loss.sum().backward()
    assert loss.tolist() == expected
    assert x.grad is not None
    with pytest.raises(AssertionError, match="median"):
        poptorch.identity_loss(torch.ones(1), "median")
