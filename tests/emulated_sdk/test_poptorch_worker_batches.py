"""`stack_into` writes the batches of torch's `default_collate`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from poptorch.data.fetcher import stack_into
from poptorch.pytree import flatten_element
from torch.utils.data import default_collate

from tests.support.poptorch_data import Pair

ONE, OTHER = torch.arange(3.0), torch.arange(3.0, 6.0)


def stacked(first, samples):
    """Return the result of `stack_into` and the targets, which have the format of the batch `first`."""
    tensors, spec = flatten_element(default_collate(first))
    targets = [torch.full_like(tensor, -1) for tensor in tensors]
    return stack_into(targets, spec, samples), targets


@pytest.mark.parametrize(
    "samples",
    [
        [ONE, OTHER],
        [(ONE, 1), (OTHER, 2)],
        [[ONE, 0.5], [OTHER, 2.0]],
        [{"x": ONE, "y": 3}, {"x": OTHER, "y": -3}],
        [(ONE.bool(), ONE.half()), (OTHER.bool(), OTHER.half())],
        [(ONE[:0], torch.tensor(1)), (OTHER[:0], torch.tensor(2))],
        [3, 4],
    ],
)
def test_common_batches_are_stacked(samples):
    is_done, tensors = stacked(samples, samples)
    expected, _ = flatten_element(default_collate(samples))
    assert is_done
    assert all(got.equal(wanted) for got, wanted in zip(tensors, expected))


@pytest.mark.parametrize(
    ("first", "samples"),
    [
        ([ONE, OTHER], [ONE]),
        ([ONE, OTHER], [ONE, OTHER.double()]),
        ([ONE, OTHER], [ONE, OTHER[:2]]),
        ([ONE, OTHER], [ONE, 3]),
        ([3, 4], [3, 4.5]),
        ([3, 4], [True, False]),
        ([(ONE, 1), (OTHER, 2)], [(ONE, 1), (OTHER,)]),
        ([(ONE, 1), (OTHER, 2)], [Pair(ONE, 1), Pair(OTHER, 2)]),
        ([{"x": ONE}, {"x": OTHER}], [{"x": ONE}, {"y": OTHER}]),
        ([ONE, OTHER], [np.zeros(3, np.float32), np.zeros(3, np.float32)]),
    ],
)
def test_other_batches_return_false(first, samples):
    assert not stacked(first, samples)[0]
