"""`dynamic_slice` and `dynamic_update`."""

from __future__ import annotations

import poptorch
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from poptorch_models import options
from torch import nn


class Slice(nn.Module):
    def forward(self, x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return poptorch.dynamic_slice(x, 1, start, 3, 2)


class Update(nn.Module):
    def forward(self, x: torch.Tensor, src: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return poptorch.dynamic_update(x, src, 1, start, 2)


def test_the_place_of_a_slice_is_read_at_every_call_on_every_replica():
    model = poptorch.inferenceModel(Slice(), options(replicas=2))
    x = torch.arange(12.0).reshape(2, 6)
    assert model(x, torch.tensor([0, 3])).tolist() == [[0.0, 2.0], [9.0, 11.0]]
    assert model(x, torch.tensor([2, 1])).tolist() == [[2.0, 4.0], [7.0, 9.0]]


def test_an_update_leaves_its_input_alone():
    x, src = torch.zeros(1, 4), torch.ones(1, 2)
    model = poptorch.inferenceModel(Update(), options())
    assert model(x, src, torch.tensor([1])).tolist() == [[0.0, 1.0, 1.0, 0.0]]
    assert model(x, src, torch.tensor([2])).tolist() == [[0.0, 0.0, 1.0, 1.0]]
    assert not x.any()


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(1, 3))
def test_slices_are_those_of_python(data, length, step):
    start = data.draw(st.integers(0, length - 1))
    size = data.draw(st.integers(1, length - start))
    x = torch.arange(float(length))
    assert torch.equal(poptorch.dynamic_slice(x, 0, start, size, step), x[start : start + size : step])


def test_gradients_flow_through_both():
    x, src = torch.ones(4, requires_grad=True), torch.ones(2, requires_grad=True)
    updated = poptorch.dynamic_update(x, src, -1, torch.tensor(1), 2)
    poptorch.dynamic_slice(updated, 0, 2, 2, 1).sum().backward()
    assert x.grad.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert src.grad.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: poptorch.dynamic_slice([1], 0, 0, 1, 1), "`tensor` is a tensor"),
        (lambda x: poptorch.dynamic_slice(x, 1, 0, 1, 1), "the tensor has 1 dimensions"),
        (lambda x: poptorch.dynamic_slice(x, 0, 3, 2, 1), "a slice of 2 from 3 leaves dimension 0, which has 4"),
        (lambda x: poptorch.dynamic_slice(x, 0, torch.tensor(-1), 2, 1), "a slice of 2 from -1"),
        (lambda x: poptorch.dynamic_slice(x, 0, torch.tensor(1.0), 2, 1), "`start` is one integer, not float32"),
        (
            lambda x: poptorch.dynamic_slice(x, 0, torch.tensor([1, 2]), 2, 1),
            r"`start` is one integer, not int32 \[2\]",
        ),
        (lambda x: poptorch.dynamic_slice(x, 0, 0, torch.tensor(2), 1), "`size` is a constant int"),
        (lambda x: poptorch.dynamic_slice(x, 0, 0, 2, 0), "`step` is a constant int of at least 1"),
        (lambda x: poptorch.dynamic_update(x, x, 0, 0, 2), r"`src` is float32 \[4\], but the slice .* float32 \[2\]"),
        (lambda x: poptorch.dynamic_update(x, x[:2].to(torch.int64), 0, 0, 2), r"`src` is int32 \[2\]"),
        (lambda x: poptorch.dynamic_update(x, x, 0, 1, 4), "a slice of 4 from 1"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(poptorch.Error, match=message) as error:
        call(torch.ones(4))
    assert isinstance(error.value, ValueError)
