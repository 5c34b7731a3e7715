"""`registerCustomArgParser`: types of a program as arguments and outputs; constant arguments."""

from __future__ import annotations

import warnings

import poptorch
import pytest
import torch
from poptorch import pytree
from torch import nn

from tests.support.poptorch_models import options


class Pair:
    def __init__(self, first, second, name="pair"):
        self.first, self.second, self.name = first, second, name


class NamedPair(Pair):
    pass


class PairParser(poptorch.ICustomArgParser):
    def yieldTensors(self, struct):
        yield struct.first
        yield struct.second

    def reconstruct(self, original_structure, tensor_iterator):
        return type(original_structure)(next(tensor_iterator), next(tensor_iterator), original_structure.name)


@pytest.fixture
def _register_pairs(monkeypatch):
    monkeypatch.setattr(pytree, "_parsers", {})
    poptorch.registerCustomArgParser(Pair, PairParser())


class Swap(nn.Module):
    def forward(self, pair, scale=1):
        return type(pair)(pair.second * scale, pair.first * scale, pair.name)


@pytest.mark.usefixtures("_register_pairs")
@pytest.mark.parametrize("kind", [Pair, NamedPair])
def test_a_registered_type_can_be_argument_and_output(kind):
    swapped = poptorch.inferenceModel(Swap(), options(2))(kind(torch.arange(4.0), torch.ones(2), "mine"), scale=2)
    assert type(swapped) is kind
    assert (swapped.first.tolist(), swapped.second.tolist(), swapped.name) == ([2, 2], [0, 2, 4, 6], "mine")


@pytest.mark.usefixtures("_register_pairs")
def test_registered_types_can_be_nested():
    class Nest(nn.Module):
        def forward(self, nested):
            return {"sum": nested["pairs"][0].first + nested["pairs"][1].second}, nested["pairs"][0]

    one = {"pairs": [Pair(torch.ones(1), torch.zeros(1)), Pair(torch.zeros(1), torch.ones(1))]}
    total, pair = poptorch.inferenceModel(Nest(), options())(one)
    assert total["sum"].item() == 2
    assert pair.second.item() == 0


@pytest.mark.usefixtures("_register_pairs")
def test_later_calls_use_their_own_tensors():
    model = poptorch.inferenceModel(Swap(), options())
    model(Pair(torch.ones(1), torch.ones(1)))
    assert model(Pair(torch.ones(1), 5 * torch.ones(1))).first.item() == 5
    with pytest.raises(poptorch.Error, match=r"Shape mismatch for pair\[1\]"):
        model(Pair(torch.ones(1), torch.ones(2)))


@pytest.mark.parametrize("wrong", [(3, PairParser()), (Pair, PairParser)])
def test_registering_needs_a_type_and_a_parser(wrong):
    with pytest.raises(poptorch.Error, match="registerCustomArgParser|ICustomArgParser"):
        poptorch.registerCustomArgParser(*wrong)


def test_an_object_with_tensor_attributes_and_no_parser_is_rejected():
    with pytest.raises(poptorch.Error, match=r"registerCustomArgParser\(Pair"):
        poptorch.inferenceModel(Swap(), options())(Pair(torch.ones(1), torch.ones(1)))


class Weighted(nn.Module):
    def forward(self, x, weights, bias=None):
        return x * float(weights[0]) if bias is None else x + bias


def test_array_constants_are_compared_item_by_item():
    def array(*items):
        return torch.tensor(items).numpy()

    model = poptorch.inferenceModel(Weighted(), options())
    assert model(torch.ones(1), array(2.0, 3.0)).item() == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(1), array(2.0, 3.0))
    with pytest.raises(poptorch.Error, match="Value mismatch for weights"):
        model(torch.ones(1), array(4.0, 3.0))


def test_a_constant_that_cannot_be_compared_equals_only_itself():
    weights = _Incomparable([2.0])
    model = poptorch.inferenceModel(Weighted(), options())
    assert [model(torch.ones(1), weights).item() for _ in range(2)] == [2, 2]
    with pytest.raises(poptorch.Error, match="Value mismatch for weights"):
        model(torch.ones(1), _Incomparable([2.0]))


class _Incomparable:
    """Raises when it is compared."""

    def __init__(self, items):
        self.items = items

    def __getitem__(self, index):
        return self.items[index]

    def __eq__(self, other):
        raise TypeError("not comparable")

    __hash__ = None


def test_none_and_a_tensor_are_different_structures():
    model = poptorch.inferenceModel(Weighted(), options())
    assert model(torch.ones(1), (3,), bias=None).item() == 3
    assert model(x=torch.ones(1), weights=(3,)).item() == 3
    with pytest.raises(
        poptorch.Error, match="Type mismatch for bias: expected <class 'NoneType'> but got <class 'torch.Tensor'>"
    ):
        model(torch.ones(1), (3,), torch.ones(1))
