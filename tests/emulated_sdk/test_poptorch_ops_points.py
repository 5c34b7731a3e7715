"""`fps` and `nearest` compared with slow reference implementations."""

from __future__ import annotations

import poptorch
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.poptorch_models import options


def points(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))


def test_fps_takes_the_farthest_points():
    src = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]])
    assert poptorch.fps(src, [0, 4], ratio=0.5).tolist() == [0, 3]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.floats(0.05, 1.0), st.integers(0, 100))
def test_fps_samples_each_cloud_independently(first, second, ratio, seed):
    src = points(first + second, seed)
    taken = poptorch.fps(src, [0, first, first + second], ratio)
    alone = torch.cat(
        [poptorch.fps(src[:first], [0, first], ratio), first + poptorch.fps(src[first:], [0, second], ratio)]
    )
    assert torch.equal(taken, alone)
    assert len(set(taken.tolist())) == len(taken)


def test_fps_draws_the_random_start_from_torch():
    src = points(16)
    starts = set()
    for seed in range(20):
        torch.manual_seed(seed)
        starts.add(poptorch.fps(src, [0, 16], 0.1, random_start=True)[0].item())
    assert len(starts) > 5


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 100))
def test_nearest_minimizes_the_distance(of_x, of_y, seed):
    x, y = points(of_x, seed), points(of_y, seed + 1)
    expected = [min(range(of_y), key=lambda j: float((each - y[j]).square().sum())) for each in x]
    assert poptorch.nearest(x, y).tolist() == expected


def test_nearest_compares_points_of_the_same_cloud():
    x, y = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.0, 5.0, 6.0])
    assert poptorch.nearest(x, y, torch.tensor([0, 0, 1]), [0, 1, 1]).tolist() == [0, 0, 1]


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.float64])
def test_points_of_any_floating_point_dtype(dtype):
    x, y = torch.tensor([[0.0], [2.0]], dtype=dtype), torch.tensor([[2.5], [-1.0]], dtype=dtype)
    assert poptorch.nearest(x, y).tolist() == [1, 0]
    assert poptorch.fps(x, [0, 2], 1.0).tolist() == [0, 1]


def test_ops_in_a_model():
    class Sample(nn.Module):
        def forward(self, src: torch.Tensor) -> torch.Tensor:
            taken = poptorch.fps(src, [0, len(src)], 0.5)
            return poptorch.nearest(src, src[taken])

    x = points(8)
    found = poptorch.inferenceModel(Sample(), options(replicas=2))(x)
    assert found.dtype == torch.int32
    assert found[:4].tolist() == Sample()(x[:4]).tolist()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: poptorch.fps(points(3), [0, 2]), r"must increase from 0 to the number of points, 3; got \[0, 2\]"),
        (lambda: poptorch.fps(points(3), []), "must increase from 0"),
        (lambda: poptorch.fps(points(3), [0, 3], ratio=0.0), r"`ratio` must be in \(0, 1\]"),
        (lambda: poptorch.fps(torch.ones(1, 1, 1), [0, 1]), r"`src` must be floating point \[points, features\]"),
        (lambda: poptorch.nearest(points(2), torch.ones(2, 3)), "`x` has 2 features, but `y` has 3"),
        (lambda: poptorch.nearest(points(2), points(2), [1, 0], [0, 1]), "'batch_x' is not sorted"),
        (lambda: poptorch.nearest(points(2), points(2), [0, 1], [0, 0]), "cloud 1 of `batch_x` has no point"),
        (lambda: poptorch.nearest(points(2), points(2), [0], [0, 0]), r"`batch_x` must be \[2\] integers"),
        (lambda: poptorch.nearest(points(2).long(), points(2)), "`x` must be floating point"),
    ],
)
def test_rejects_invalid_arguments(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert isinstance(error.value, poptorch.Error)
