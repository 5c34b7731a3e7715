"""Ops that leave values as they are: layout hints, serialised products, names, custom ops."""

from __future__ import annotations

import poptorch
import pytest
import torch
from poptorch_models import Line, options
from torch import nn

Mode = poptorch.MatMulSerializationMode


def test_hints_are_identities_with_gradients():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = poptorch.nop(poptorch.set_available_memory(poptorch.recomputationCheckpoint(x), 0.2))
    assert torch.equal(x, y)
    y.sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]


def test_a_nop_is_a_tensor_of_its_own():
    x = torch.zeros(2)
    poptorch.nop(x).add_(1)
    assert not x.any()


def test_checkpoints_nest_as_they_are_given():
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
def test_hints_change_nothing_of_a_training(replicas):
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
def test_a_serialised_product_is_the_product(mode, factor):
    class Product(nn.Module):
        def forward(self, lhs, rhs):
            return poptorch.serializedMatMul(lhs, rhs, mode, factor, keep_precision=True)

    lhs, rhs = torch.randn(1, 4, 6), torch.randn(1, 6, 5)
    assert torch.equal(poptorch.inferenceModel(Product(), options())(lhs, rhs), lhs @ rhs)


def test_gradients_flow_through_a_serialised_product():
    lhs = torch.ones(2, 3, requires_grad=True)
    poptorch.serializedMatMul(lhs, torch.ones(3, 4), Mode.ReducingDim, 3).sum().backward()
    assert torch.equal(lhs.grad, torch.full((2, 3), 4.0))


@pytest.mark.parametrize(
    ("mode", "factor", "size"),
    [(Mode.InputChannels, 3, 4), (Mode.ReducingDim, 4, 6), (Mode.OutputChannels, 2, 5), (Mode.ReducingDim, 0, 6)],
)
def test_a_factor_must_divide(mode, factor, size):
    with pytest.raises(poptorch.Error, match=f"factor {factor} .* divide the dimension of {size}"):
        poptorch.serializedMatMul(torch.ones(4, 6), torch.ones(6, 5), mode, factor)


@pytest.mark.parametrize(
    "arguments", [("reducing_dim", 2, False), (Mode.ReducingDim, 2.0, False), (Mode.ReducingDim, 2, 1)]
)
def test_arguments_of_a_serialised_product_have_their_types(arguments):
    with pytest.raises(AssertionError, match="serializedMatMul"):
        poptorch.serializedMatMul(torch.ones(2, 2), torch.ones(2, 2), *arguments)


@pytest.mark.parametrize("share", [-0.1, 1.1, "half", None, True])
def test_a_share_of_memory_lies_between_zero_and_one(share):
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        poptorch.set_available_memory(torch.ones(1), share)


@pytest.mark.parametrize("op", [poptorch.nop, poptorch.recomputationCheckpoint])
def test_what_is_no_tensor_is_refused(op):
    with pytest.raises(poptorch.Error, match="is a tensor, not str"):
        op("x")


def test_the_name_of_a_scope_is_a_string():
    with pytest.raises(AssertionError, match="must be a string, not int"):
        poptorch.NameScope(3)


def test_a_custom_op_is_refused_with_the_way_out():
    with pytest.raises(poptorch.Error, match=r"com.acme.Cube:1 is C\+\+ for the IPU .* call a torch implementation"):
        poptorch.custom_op([torch.ones(1)], "Cube", "com.acme", 1, [torch.ones(1)])
