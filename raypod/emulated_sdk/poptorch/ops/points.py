"""Ops on point clouds, with the semantics of torch_cluster."""

from __future__ import annotations

import math
from typing import List, Optional, Sequence, Union

import torch

from poptorch.ops.arguments import ArgumentError, Signature, checked_tensor

_Indices = Union[torch.Tensor, Sequence[int]]

_DISTANCES = 2**22  # that `nearest` computes at a time


def fps(src: torch.Tensor, ptr: List[int], ratio: float = 0.5, random_start: bool = False) -> torch.Tensor:
    """Farthest point sampling: from each cloud, repeatedly take the point farthest from those already taken.

    Args:
        src: [points, features], the clouds one after the other; or [points] for one feature.
        ptr: the first point of each cloud, and the number of points: [0, ..., points].
        ratio: share of each cloud to sample, in (0, 1], rounded up.
        random_start: start at a random point of the cloud instead of its first.

    Returns:
        Indices into `src`, int64 (int32 at the API of a model).

    Raises:
        poptorch.Error and ValueError: other arguments.
    """
    for name, value, kind in (("ptr", ptr, list), ("ratio", ratio, float), ("random_start", random_start, bool)):
        if not isinstance(value, kind):
            raise ArgumentError(f"poptorch.fps: `{name}` must be a {kind.__name__}, not {value!r}")
    points = _points("fps", "src", src)
    bounds = _bounds(ptr, len(points))
    if not 0 < ratio <= 1:
        raise ArgumentError(f"poptorch.fps: `ratio` must be in (0, 1], not {ratio!r}")
    taken = [
        begin + _farthest(points[begin:end], math.ceil(ratio * (end - begin)), random_start)
        for begin, end in zip(bounds, bounds[1:])
    ]
    return torch.cat(taken) if taken else torch.zeros(0, dtype=torch.long)


def nearest(
    x: torch.Tensor, y: torch.Tensor, batch_x: Optional[_Indices] = None, batch_y: Optional[_Indices] = None
) -> torch.Tensor:
    """Return for each point of `x` the index of the nearest point of `y`, the first of several.

    Args:
        x: [points of x, features], or [points] for one feature.
        y: [points of y, features], or [points] for one feature.
        batch_x, batch_y: the cloud of each point, in ascending order; one cloud by default. A point is compared with
            the points of the same cloud only.

    Returns:
        [points of x] int64 (int32 at the API of a model).

    Raises:
        poptorch.Error and ValueError: other arguments.
    """
    x, y = _points("nearest", "x", x), _points("nearest", "y", y)
    if x.shape[1] != y.shape[1]:
        raise ArgumentError(f"poptorch.nearest: `x` has {x.shape[1]} features, but `y` has {y.shape[1]}")
    of_x, of_y = _clouds("batch_x", batch_x, len(x)), _clouds("batch_y", batch_y, len(y))
    unmatched = sorted(set(of_x.tolist()) - set(of_y.tolist()))
    if unmatched:
        raise ArgumentError(f"poptorch.nearest: cloud {unmatched[0]} of `batch_x` has no point in `batch_y`")
    rows = max(1, _DISTANCES // max(1, len(y)))
    found = [_nearest(x[at : at + rows], y, of_x[at : at + rows], of_y) for at in range(0, len(x), rows)]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.long)


def _nearest(x: torch.Tensor, y: torch.Tensor, of_x: torch.Tensor, of_y: torch.Tensor) -> torch.Tensor:
    # Not by a matrix product, which is faster for many features, but inaccurate for small distances.
    distances = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.masked_fill(of_x[:, None] != of_y[None, :], float("inf")).argmin(1)


def _farthest(points: torch.Tensor, count: int, random_start: bool) -> torch.Tensor:
    if not count:
        return torch.zeros(0, dtype=torch.long)
    taken = torch.zeros(count, dtype=torch.long)
    if random_start:
        taken[0] = torch.randint(len(points), ())
    distance = (points - points[taken[0]]).square().sum(-1)
    for index in range(1, count):
        taken[index] = distance.argmax()
        distance = torch.minimum(distance, (points - points[taken[index]]).square().sum(-1))
    return taken


def _points(op: str, name: str, points: torch.Tensor) -> torch.Tensor:
    checked_tensor(op, name, points)
    if points.dim() not in (1, 2) or not points.is_floating_point():
        raise ArgumentError(
            f"poptorch.{op}: `{name}` must be floating point [points, features], not {Signature.of([points])}"
        )
    points = points.detach() if points.dtype in (torch.float32, torch.float64) else points.detach().float()
    return points[:, None] if points.dim() == 1 else points


def _bounds(ptr: _Indices, points: int) -> List[int]:
    bounds = [int(bound) for bound in ptr]
    if not bounds or bounds[0] != 0 or bounds[-1] != points or sorted(bounds) != bounds:
        raise ArgumentError(f"poptorch.fps: `ptr` must increase from 0 to the number of points, {points}; got {bounds}")
    return bounds


def _clouds(name: str, batch: Optional[_Indices], points: int) -> torch.Tensor:
    clouds = torch.zeros(points, dtype=torch.long) if batch is None else torch.as_tensor(batch)
    if clouds.shape != (points,) or clouds.is_floating_point():
        raise ArgumentError(f"poptorch.nearest: `{name}` must be [{points}] integers, not {Signature.of([clouds])}")
    if (clouds[1:] < clouds[:-1]).any():
        raise ArgumentError(f"poptorch.nearest: '{name}' is not sorted")
    return clouds
