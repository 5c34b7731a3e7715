"""Hints to the compiler (memory, recomputation, serialization, overlap, names, `MultiConv`) do not change values."""

from __future__ import annotations

from typing import Any, Callable

import poptorch
import pytest
import torch
from torch import nn

from tests.support.poptorch_models import Line, options

Mode = poptorch.MatMulSerializationMode


def test_hints_are_differentiable_identities():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = poptorch.nop(poptorch.set_available_memory(poptorch.recomputationCheckpoint(x), 0.2))
    assert torch.equal(x, y)
    y.sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]


def test_nop_returns_a_copy():
    x = torch.zeros(2)
    poptorch.nop(x).add_(1)
    assert not x.any()


def test_recomputation_checkpoint_keeps_the_container_type():
    a, b = torch.zeros(1), torch.ones(1)
    assert [each.item() for each in poptorch.recomputationCheckpoint(a, b)] == [0.0, 1.0]
    assert isinstance(poptorch.recomputationCheckpoint(a, b), tuple)
    assert isinstance(poptorch.recomputationCheckpoint([a, b]), list)
    assert isinstance(poptorch.recomputationCheckpoint((a,)), tuple)


class Hinted(Line):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with poptorch.NameScope("hinted"):
            hinted = poptorch.recomputationCheckpoint(poptorch.nop(x))
        return super().forward(poptorch.set_available_memory(hinted, 1))


@pytest.mark.parametrize("replicas", [1, 2])
def test_hints_do_not_change_training(replicas):
    weights = []
    for kind in (Line, Hinted):
        model = kind()
        training = poptorch.trainingModel(model, options(replicas), torch.optim.SGD(model.parameters(), lr=0.1))
        training(torch.tensor([1.0, 4.0]))
        weights.append(model.weight.item())
    assert weights[0] == weights[1] == 0.75


@pytest.mark.parametrize(
    ("mode", "factor"), [(Mode.InputChannels, 2), (Mode.ReducingDim, 3), (Mode.OutputChannels, 5), (Mode.Disabled, 0)]
)
def test_serialized_matmul_equals_matmul(mode, factor):
    class Product(nn.Module):
        def forward(self, lhs, rhs):
            return poptorch.serializedMatMul(lhs, rhs, mode, factor, keep_precision=True)

    lhs, rhs = torch.randn(1, 4, 6), torch.randn(1, 6, 5)
    assert torch.equal(poptorch.inferenceModel(Product(), options())(lhs, rhs), lhs @ rhs)


def test_serialized_matmul_is_differentiable():
    lhs = torch.ones(2, 3, requires_grad=True)
    poptorch.serializedMatMul(lhs, torch.ones(3, 4), Mode.ReducingDim, 3).sum().backward()
    assert torch.equal(lhs.grad, torch.full((2, 3), 4.0))


@pytest.mark.parametrize(
    ("mode", "factor", "size"),
    [(Mode.InputChannels, 3, 4), (Mode.ReducingDim, 4, 6), (Mode.OutputChannels, 2, 5), (Mode.ReducingDim, 0, 6)],
)
def test_serialization_factor_must_divide_the_dimension(mode, factor, size):
    with pytest.raises(poptorch.Error, match=f"factor {factor} .* divide the dimension of size {size}"):
        poptorch.serializedMatMul(torch.ones(4, 6), torch.ones(6, 5), mode, factor)


@pytest.mark.parametrize(
    "arguments", [("reducing_dim", 2, False), (Mode.ReducingDim, 2.0, False), (Mode.ReducingDim, 2, 1)]
)
def test_serialized_matmul_checks_argument_types(arguments):
    with pytest.raises(AssertionError, match="serializedMatMul"):
        poptorch.serializedMatMul(torch.ones(2, 2), torch.ones(2, 2), *arguments)


@pytest.mark.parametrize("share", [-0.1, 1.1, "half", None, True])
def test_memory_proportion_must_be_in_0_to_1(share):
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        poptorch.set_available_memory(torch.ones(1), share)


@pytest.mark.parametrize("op", [poptorch.nop, poptorch.recomputationCheckpoint])
def test_non_tensors_raise_error(op):
    with pytest.raises(poptorch.Error, match="must be a tensor, not str"):
        op("x")


def test_name_scope_must_be_a_string():
    with pytest.raises(AssertionError, match="must be a string, not int"):
        poptorch.NameScope(3)


NONE, LOOP = poptorch.OverlapMode.NoOverlap, poptorch.OverlapMode.OverlapDeviceIterationLoop


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def overlapping() -> poptorch.Options:
    """Return options that allow overlapped transfers."""
    chosen = options(iterations=2)
    chosen.TensorLocations.numIOTiles(32)
    return chosen.outputMode(poptorch.OutputMode.All).setExecutionStrategy(poptorch.ShardedExecution())


def test_overlap_does_not_change_values():
    def forward(x: torch.Tensor) -> torch.Tensor:
        return poptorch.set_overlap_for_output(poptorch.set_overlap_for_input(x, LOOP) + 1, LOOP)

    model = Calls(forward)
    x = torch.arange(2.0)
    assert torch.equal(model(x), x + 1)
    assert torch.equal(poptorch.inferenceModel(model, overlapping())(x), x + 1)


def test_overlap_of_nested_tensors():
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
def test_overlap_of_other_tensors_raises_error(function, what):
    with pytest.raises(
        poptorch.Error, match=f"set_overlap_for_{what} applied on a node which is not a tensor {what} to"
    ):
        poptorch.inferenceModel(Calls(function), overlapping())(torch.ones(2))


def test_overlapped_output_that_is_returned_twice_raises_error():
    model = Calls(lambda x: [poptorch.set_overlap_for_output(x + 1, LOOP)] * 2)
    with pytest.raises(poptorch.Error, match="returned twice"):
        poptorch.inferenceModel(model, overlapping())(torch.ones(2))


def test_no_overlap_is_allowed_for_all_tensors():
    model = Calls(lambda x: poptorch.set_overlap_for_input(x + 1, NONE))
    assert poptorch.inferenceModel(model, options())(torch.ones(1)).item() == 2.0


@pytest.mark.parametrize("op", [poptorch.set_overlap_for_input, poptorch.set_overlap_for_output])
def test_overlap_mode_must_be_an_overlap_mode(op):
    with pytest.raises(AssertionError, match="`mode` must be a poptorch.OverlapMode, not 'no_overlap'"):
        op(torch.ones(1), "no_overlap")


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


def test_multi_conv_does_not_change_values():
    multi = poptorch.MultiConv().availableMemoryProportions((0.1, 0.2)).partialsTypes(torch.half)
    multi = multi.enableConvDithering([True, False]).planType(poptorch.MultiConvPlanType.Parallel)
    model = TwoConvolutions(multi.perConvReservedTiles(100).cycleBackOff(0.3)).eval()
    expected = model.first(image()) + model.second(image())
    assert torch.equal(poptorch.inferenceModel(model, options())(image()), expected)
    assert torch.equal(model(image()), expected)


def test_multi_conv_in_training_on_several_replicas():
    model = TwoConvolutions(poptorch.MultiConv())
    before = model.first.weight.detach().clone()
    assert poptorch.trainingModel(model, options(replicas=2))(image(2)).shape == (2,)
    assert not torch.equal(before, model.first.weight)


def test_multi_conv_with_a_wrong_number_of_values_raises_error():
    model = TwoConvolutions(poptorch.MultiConv().availableMemoryProportions([0.1, 0.2, 0.3]))
    with pytest.raises(poptorch.Error, match="has 3 values, but there are 2 convolutions"):
        poptorch.trainingModel(model, options())(image())


def test_multi_conv_without_convolutions_raises_error():
    class Empty(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with poptorch.MultiConv():
                return x + 1

    with pytest.raises(poptorch.Error, match="has no convolution"):
        poptorch.inferenceModel(Empty(), options())(torch.ones(1))


def test_nested_multi_conv_raises_error_and_leaves_no_context():
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
def test_multi_conv_values_of_other_types_raise_error(setter, value):
    with pytest.raises(AssertionError, match="Invalid"):
        getattr(poptorch.MultiConv(), setter)(value)


def test_multi_conv_partials_must_be_float_or_half():
    for value in ([torch.half, torch.int32], torch.int32, "half", ["half"]):
        with pytest.raises(ValueError, match="Invalid partials types. Expected torch.float32 or torch.float16, got"):
            poptorch.MultiConv().partialsTypes(value)


def test_multi_conv_none_restores_the_default():
    multi = poptorch.MultiConv().availableMemoryProportions([0.1, 0.2, 0.3]).partialsTypes(torch.half)
    multi = multi.availableMemoryProportions(None).partialsTypes(None).enableConvDithering(None)
    assert poptorch.trainingModel(TwoConvolutions(multi), options())(image()).dim() == 0


def test_overlapped_input_may_have_other_uses():
    model = Calls(lambda x: (x + 1, poptorch.set_overlap_for_input(x, LOOP) + 2))
    results = poptorch.inferenceModel(model, overlapping())(torch.ones(2))
    assert [result.tolist() for result in results] == [[2.0, 2.0], [3.0, 3.0]]
