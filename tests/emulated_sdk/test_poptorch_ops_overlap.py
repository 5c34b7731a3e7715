"""`set_overlap_for_input` and `set_overlap_for_output`: values stay, and only transfers can overlap."""

from __future__ import annotations

from typing import Any, Callable

import poptorch
import pytest
import torch
from poptorch_models import options
from torch import nn

NONE, LOOP = poptorch.OverlapMode.NoOverlap, poptorch.OverlapMode.OverlapDeviceIterationLoop


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def overlapping() -> poptorch.Options:
    """Options that a device with overlapped transfers accepts."""
    chosen = options(iterations=2)
    chosen.TensorLocations.numIOTiles(32)
    return chosen.outputMode(poptorch.OutputMode.All).setExecutionStrategy(poptorch.ShardedExecution())


def test_values_are_those_without_it():
    def forward(x: torch.Tensor) -> torch.Tensor:
        return poptorch.set_overlap_for_output(poptorch.set_overlap_for_input(x, LOOP) + 1, LOOP)

    model = Calls(forward)
    x = torch.arange(2.0)
    assert torch.equal(model(x), x + 1)
    assert torch.equal(poptorch.inferenceModel(model, overlapping())(x), x + 1)


def test_nested_tensors_are_taken_and_returned():
    nested = {"a": torch.ones(1), "b": (torch.ones(1), [torch.ones(1)])}
    assert poptorch.set_overlap_for_input(nested, LOOP) is nested
    model = Calls(lambda x: poptorch.set_overlap_for_input(x, LOOP)["b"][0] + 1)
    doubled = {"a": torch.ones(2), "b": (torch.ones(2), [torch.ones(2)])}
    assert poptorch.inferenceModel(model, overlapping())(doubled).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda x: poptorch.set_overlap_for_input(x + 1, LOOP), "input"),
        (lambda x: poptorch.set_overlap_for_output(x, LOOP) + 1, "output"),
    ],
)
def test_only_transfers_can_overlap(function, what):
    with pytest.raises(poptorch.Error, match=f"set_overlap_for_{what} was applied to .* not an {what} of the model"):
        poptorch.inferenceModel(Calls(function), overlapping())(torch.ones(2))


def test_no_overlap_can_be_asked_for_anywhere():
    model = Calls(lambda x: poptorch.set_overlap_for_input(x + 1, NONE))
    assert poptorch.inferenceModel(model, options())(torch.ones(1)).item() == 2.0


@pytest.mark.parametrize("op", [poptorch.set_overlap_for_input, poptorch.set_overlap_for_output])
def test_a_mode_is_a_member_of_the_enumeration(op):
    with pytest.raises(AssertionError, match="mode is a poptorch.OverlapMode, not 'no_overlap'"):
        op(torch.ones(1), "no_overlap")
