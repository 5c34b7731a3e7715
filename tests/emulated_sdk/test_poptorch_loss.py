"""Losses of training: marking, and exactly one final loss."""

from __future__ import annotations

import poptorch
import pytest
import torch
import torch.nn.functional as F
from poptorch_models import options
from torch import nn


class WithLoss(nn.Module):
    """Applies a function to the scaled input and a target."""

    def __init__(self, loss):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))
        self.loss = loss

    def forward(self, x, y):
        return self.loss(self.weight * x, y)


def trained_weight(loss, lr=0.5):
    model = WithLoss(loss)
    training = poptorch.trainingModel(model, options(), poptorch.optim.SGD(model.parameters(), lr=lr))
    training(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 0.0]))
    return model.weight.item()


def test_gradients_start_at_the_marked_loss_and_not_at_the_output():
    plain = trained_weight(F.mse_loss)
    assert plain == 2 - 0.5 * 4
    assert trained_weight(lambda p, y: F.mse_loss(p, y) * 10) == plain


def test_scaling_a_marked_loss_in_place_does_not_scale_gradients():
    assert trained_weight(lambda p, y: F.mse_loss(p, y).mul_(10)) == trained_weight(F.mse_loss)


def test_identity_loss_marks_a_combination_of_losses():
    def scaled(p, y):
        return poptorch.identity_loss(F.mse_loss(p, y) * 0.5, "none")

    assert trained_weight(scaled) == 2 - 0.5 * 2


def test_the_loss_does_not_have_to_be_returned():
    def hidden(p, y):
        F.mse_loss(p, y)
        return p

    assert trained_weight(hidden) == trained_weight(F.mse_loss)


def test_a_loss_module_marks_as_its_function_does():
    assert trained_weight(nn.MSELoss()) == trained_weight(F.mse_loss)


def test_a_forward_without_a_marked_loss_is_rejected():
    with pytest.raises(poptorch.Error, match=r"Couldn't find a loss in graph!"):
        trained_weight(lambda p, y: ((p - y) ** 2).mean())


def test_two_independent_losses_are_rejected():
    with pytest.raises(poptorch.Error, match=r"Multiple independent losses"):
        trained_weight(lambda p, y: (F.mse_loss(p, y), F.l1_loss(p, y)))


def test_losses_that_a_third_depends_on_are_allowed():
    def combined(p, y):
        return poptorch.identity_loss(F.mse_loss(p, y) + F.l1_loss(p, y), "sum")

    assert trained_weight(combined, lr=0.1) == pytest.approx(2 - 0.1 * (4 + 1))


def test_a_final_loss_of_several_numbers_is_rejected():
    with pytest.raises(poptorch.Error, match="reduce it to one number"):
        trained_weight(lambda p, y: F.mse_loss(p, y, reduction="none"))


def test_inference_needs_no_loss():
    model = poptorch.inferenceModel(WithLoss(lambda p, y: poptorch.identity_loss(p, "mean")), options())
    assert model(torch.ones(2), torch.ones(2)).item() == 2


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 6.0), ("mean", 2.0), ("none", [1.0, 2.0, 3.0])])
def test_identity_loss_on_the_host_is_the_plain_reduction(reduction, expected):
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    loss = poptorch.identity_loss(x, reduction)
    loss.sum().backward()
    assert loss.tolist() == expected
    assert x.grad is not None


def test_an_unknown_reduction_is_rejected():
    with pytest.raises(AssertionError, match="median"):
        poptorch.identity_loss(torch.ones(1), "median")


@pytest.mark.parametrize("name", ["smooth_l1_loss", "huber_loss", "l1_loss", "binary_cross_entropy_with_logits"])
def test_other_loss_functions_of_torch_mark(name):
    assert trained_weight(getattr(F, name)) != 2
