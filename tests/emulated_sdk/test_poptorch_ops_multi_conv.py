"""`MultiConv`: its setters, and the checks of compilation."""

from __future__ import annotations

from typing import Any

import poptorch
import pytest
import torch
from poptorch_models import options
from torch import nn


class TwoConvolutions(nn.Module):
    def __init__(self, multi: Any) -> None:
        super().__init__()
        self.multi = multi
        self.first = nn.Conv2d(1, 2, 3)
        self.second = nn.Conv2d(1, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.multi:
            one, other = self.first(x), self.second(x)
        loss = poptorch.identity_loss(one * other, "mean")
        return one + other if not self.training else loss


def image(samples: int = 1) -> torch.Tensor:
    return torch.ones(samples, 1, 4, 4)


def test_does_not_change_values():
    multi = poptorch.MultiConv().availableMemoryProportions((0.1, 0.2)).partialsTypes(torch.half)
    multi = multi.enableConvDithering([True, False]).planType(poptorch.MultiConvPlanType.Parallel)
    model = TwoConvolutions(multi.perConvReservedTiles(100).cycleBackOff(0.3)).eval()
    expected = model.first(image()) + model.second(image())
    assert torch.equal(poptorch.inferenceModel(model, options())(image()), expected)
    assert torch.equal(model(image()), expected)


def test_training_on_several_replicas():
    model = TwoConvolutions(poptorch.MultiConv())
    before = model.first.weight.detach().clone()
    assert poptorch.trainingModel(model, options(replicas=2))(image(2)).shape == (2,)
    assert not torch.equal(before, model.first.weight)


def test_wrong_number_of_values_raises_error():
    model = TwoConvolutions(poptorch.MultiConv().availableMemoryProportions([0.1, 0.2, 0.3]))
    with pytest.raises(poptorch.Error, match="has 3 values, but there are 2 convolutions"):
        poptorch.trainingModel(model, options())(image())


def test_context_without_convolutions_raises_error():
    class Empty(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with poptorch.MultiConv():
                return x + 1

    with pytest.raises(poptorch.Error, match="has no convolution"):
        poptorch.inferenceModel(Empty(), options())(torch.ones(1))


def test_nesting_raises_error_and_leaves_no_context():
    with pytest.raises(poptorch.Error, match="Nested poptorch.MultiConv"), poptorch.MultiConv(), poptorch.MultiConv():
        pass
    with poptorch.MultiConv():
        pass


@pytest.mark.parametrize(
    ("setter", "value"),
    [
        ("availableMemoryProportions", 2.0),
        ("availableMemoryProportions", ["a"]),
        ("availableMemoryProportions", ()),
        ("partialsTypes", []),
        ("enableConvDithering", 1),
        ("planType", "parallel"),
        ("perConvReservedTiles", 0.5),
        ("cycleBackOff", "much"),
    ],
)
def test_values_of_other_types_raise_error(setter, value):
    with pytest.raises(AssertionError, match="Invalid"):
        getattr(poptorch.MultiConv(), setter)(value)


def test_partials_must_be_float_or_half():
    for value in ([torch.half, torch.int32], torch.int32, "half", ["half"]):
        with pytest.raises(ValueError, match="Invalid partials types. Expected torch.float32 or torch.float16, got"):
            poptorch.MultiConv().partialsTypes(value)


def test_none_restores_the_default():
    multi = poptorch.MultiConv().availableMemoryProportions([0.1, 0.2, 0.3]).partialsTypes(torch.half)
    multi = multi.availableMemoryProportions(None).partialsTypes(None).enableConvDithering(None)
    assert poptorch.trainingModel(TwoConvolutions(multi), options())(image()).dim() == 0
