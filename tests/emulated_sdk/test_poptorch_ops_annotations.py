"""Hints to the compiler (memory, recomputation, serialization, overlap, names, `MultiConv`) do not change values."""

from __future__ import annotations

import poptorch
import pytest
import torch
from torch import nn

from tests.support.poptorch_models import Apply, on_device, options

Mode = poptorch.MatMulSerializationMode
NONE, LOOP = poptorch.OverlapMode.NoOverlap, poptorch.OverlapMode.OverlapDeviceIterationLoop
ONE, TWO_ONES = torch.ones(1), torch.ones(2)
overlap_input, overlap_output = poptorch.set_overlap_for_input, poptorch.set_overlap_for_output


def hinted(x):
    with poptorch.NameScope("hinted"):
        x = poptorch.set_available_memory(poptorch.recomputationCheckpoint(x), 0.2)
        return poptorch.nop(poptorch.set_available_memory(x, 1))


def test_hints_are_differentiable_identities():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = hinted(x)
    assert torch.equal(x, y)
    y.sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]
    assert on_device(hinted, x.detach()).tolist() == [1.0, 2.0]


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


@pytest.mark.parametrize(
    ("mode", "factor"), [(Mode.InputChannels, 2), (Mode.ReducingDim, 3), (Mode.OutputChannels, 5), (Mode.Disabled, 0)]
)
def test_serialized_matmul_equals_matmul(mode, factor):
    lhs, rhs = torch.randn(1, 4, 6), torch.randn(1, 6, 5)
    found = on_device(lambda *both: poptorch.serializedMatMul(*both, mode, factor, keep_precision=True), lhs, rhs)
    assert torch.equal(found, lhs @ rhs)


def product(*arguments):
    return poptorch.serializedMatMul(torch.ones(4, 6), torch.ones(6, 5), *arguments)


def multi_conv(setter, value):
    return getattr(poptorch.MultiConv(), setter)(value)


PARTIALS = "Invalid partials types. Expected torch.float32 or torch.float16, got"
OVERLAP = "`mode` must be a poptorch.OverlapMode, not 'no_overlap'"


@pytest.mark.parametrize(
    ("call", "arguments", "error", "message"),
    [
        (product, (Mode.InputChannels, 3), poptorch.Error, "factor 3 .* divide the dimension of size 4"),
        (product, (Mode.ReducingDim, 4), poptorch.Error, "factor 4 .* divide the dimension of size 6"),
        (product, (Mode.OutputChannels, 2), poptorch.Error, "factor 2 .* divide the dimension of size 5"),
        (product, (Mode.ReducingDim, 0), poptorch.Error, "factor 0 .* divide the dimension of size 6"),
        (product, ("reducing_dim", 2, False), AssertionError, "serializedMatMul"),
        (product, (Mode.ReducingDim, 2.0, False), AssertionError, "serializedMatMul"),
        (product, (Mode.ReducingDim, 2, 1), AssertionError, "serializedMatMul"),
        *(
            (poptorch.set_available_memory, (ONE, share), ValueError, r"in \[0, 1\]")
            for share in (-0.1, 1.1, "half", None, True)
        ),
        (poptorch.nop, ("x",), poptorch.Error, "must be a tensor, not str"),
        (poptorch.recomputationCheckpoint, ("x",), poptorch.Error, "must be a tensor, not str"),
        (poptorch.NameScope, (3,), AssertionError, "must be a string, not int"),
        (overlap_input, (ONE, "no_overlap"), AssertionError, OVERLAP),
        (overlap_output, (ONE, "no_overlap"), AssertionError, OVERLAP),
        (multi_conv, ("availableMemoryProportions", 2.0), AssertionError, "Invalid"),
        (multi_conv, ("availableMemoryProportions", ["a"]), AssertionError, "Invalid"),
        (multi_conv, ("availableMemoryProportions", ()), AssertionError, "Invalid"),
        (multi_conv, ("partialsTypes", []), AssertionError, "Invalid"),
        (multi_conv, ("enableConvDithering", 1), AssertionError, "Invalid"),
        (multi_conv, ("planType", "parallel"), AssertionError, "Invalid"),
        (multi_conv, ("perConvReservedTiles", 0.5), AssertionError, "Invalid"),
        (multi_conv, ("cycleBackOff", "much"), AssertionError, "Invalid"),
        (multi_conv, ("partialsTypes", [torch.half, torch.int32]), ValueError, PARTIALS),
        (multi_conv, ("partialsTypes", torch.int32), ValueError, PARTIALS),
        (multi_conv, ("partialsTypes", "half"), ValueError, PARTIALS),
        (multi_conv, ("partialsTypes", ["half"]), ValueError, PARTIALS),
    ],
)
def test_invalid_arguments_raise_error(call, arguments, error, message):
    with pytest.raises(error, match=message):
        call(*arguments)


def overlapping() -> poptorch.Options:
    """Return options that allow overlapped transfers."""
    chosen = options(iterations=2)
    chosen.TensorLocations.numIOTiles(32)
    return chosen.outputMode(poptorch.OutputMode.All).setExecutionStrategy(poptorch.ShardedExecution())


def test_overlap_does_not_change_values():
    def forward(x):
        return overlap_output(overlap_input(x, LOOP) + 1, LOOP), x * 2  # an overlapped input may have other uses

    x = torch.arange(2.0)
    for found in (forward(x), on_device(forward, x, opts=overlapping())):
        assert [each.tolist() for each in found] == [[1, 2], [0, 2]]
    assert on_device(lambda x: overlap_input(x + 1, NONE), ONE).item() == 2, "other tensors may have no overlap"


def test_overlap_of_nested_tensors():
    nested = {"a": TWO_ONES, "b": (TWO_ONES, [TWO_ONES])}
    assert overlap_input(nested, LOOP) is nested
    assert on_device(lambda x: overlap_input(x, LOOP)["b"][0] + 1, nested, opts=overlapping()).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x: overlap_input(x + 1, LOOP),
            "set_overlap_for_input applied on a node which is not a tensor input to",
        ),
        (
            lambda x: overlap_output(x, LOOP) + 1,
            "set_overlap_for_output applied on a node which is not a tensor output",
        ),
        (lambda x: [overlap_output(x + 1, LOOP)] * 2, "returned twice"),
    ],
)
def test_overlap_of_other_tensors_raises_error(function, message):
    with pytest.raises(poptorch.Error, match=message):
        on_device(function, TWO_ONES, opts=overlapping())


def convolutions(multi):
    """Return a model of two convolutions, within `multi`, whose results are added."""

    def forward(self, x):
        with self.multi:
            one, other = self.first(x), self.second(x)
        return poptorch.identity_loss(one * other, "mean") if self.training else one + other

    return Apply(forward, multi=multi, first=nn.Conv2d(1, 2, 3), second=nn.Conv2d(1, 2, 3))


IMAGE = torch.ones(1, 1, 4, 4)


def test_multi_conv_does_not_change_values():
    multi = poptorch.MultiConv().availableMemoryProportions((0.1, 0.2)).partialsTypes(torch.half)
    multi = multi.enableConvDithering([True, False]).planType(poptorch.MultiConvPlanType.Parallel)
    model = convolutions(multi.perConvReservedTiles(100).cycleBackOff(0.3)).eval()
    expected = model.first(IMAGE) + model.second(IMAGE)
    assert torch.equal(model(IMAGE), expected)
    assert torch.equal(poptorch.inferenceModel(model, options())(IMAGE), expected)


def test_multi_conv_needs_a_value_for_each_convolution_and_none_restores_the_default():
    multi = poptorch.MultiConv().availableMemoryProportions([0.1, 0.2, 0.3]).partialsTypes(torch.half)
    with pytest.raises(poptorch.Error, match="has 3 values, but there are 2 convolutions"):
        poptorch.trainingModel(convolutions(multi), options())(IMAGE)
    multi = multi.availableMemoryProportions(None).partialsTypes(torch.float).enableConvDithering(None)
    assert poptorch.trainingModel(convolutions(multi), options())(IMAGE).dim() == 0


def test_a_multi_conv_is_not_empty_and_not_nested_and_an_error_leaves_no_context():
    def empty(x):
        with poptorch.MultiConv():
            return x + 1

    with pytest.raises(poptorch.Error, match="has no convolution"):
        on_device(empty, ONE)
    with pytest.raises(poptorch.Error, match="Nested poptorch.MultiConv"), poptorch.MultiConv(), poptorch.MultiConv():
        pass
    with poptorch.MultiConv():
        pass
