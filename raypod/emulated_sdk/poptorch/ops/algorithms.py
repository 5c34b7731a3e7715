"""Ops with an algorithm of their own: on point clouds, as of torch_cluster, and the beam search of CTC networks.

`ctc_beam_search_decoder` is a prefix beam search: a beam is a label sequence so far, with the log-probabilities of
its alignments that end in a blank and of those that end in its last label.
"""

from __future__ import annotations

import math
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch

from poptorch.device_mode import from_host, is_on_device, off_device
from poptorch.ops.annotations import ArgumentError, Signature, checked_int, checked_tensor

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


_IMPOSSIBLE = float("-inf")
_Labels = Tuple[int, ...]


def ctc_beam_search_decoder(
    probs: torch.Tensor, lengths: torch.Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decode log-probabilities of classes by beam search; not differentiable.

    Args:
        probs: [input length T, batch N, classes C] floating point log-probabilities.
        lengths: [N] integers in 0...T, the number of valid steps.
        blank: class of the blank.
        beam_width: number of beams kept at each step.
        top_paths: number of label sequences returned, at most `beam_width`.

    Returns:
        Sorted by decreasing probability: log-probabilities [N, top_paths] in the dtype of `probs`, lengths
        [N, top_paths] int32, and labels [N, top_paths, T] int32, padded with blanks (inferred: the SDK's documentation
        does not state the logarithm and the padding). If there are fewer sequences, the others are empty and have
        log-probability -inf.

    Raises:
        poptorch.Error and ValueError: other arguments.
    """
    _check(probs, lengths, blank, beam_width, top_paths)
    steps, batch, _ = probs.shape
    with off_device(), torch.no_grad():
        log_probs = probs.detach().double()
        paths = [
            _decode(log_probs[: int(length), sample], blank, beam_width)[:top_paths]
            for sample, length in enumerate(lengths.tolist())
        ]
        scores = torch.full((batch, top_paths), _IMPOSSIBLE)
        # The emulated device stores integers in 64 bits, and returns them in 32.
        integer = torch.int64 if is_on_device() else torch.int32
        sizes = torch.zeros(batch, top_paths, dtype=integer)
        labels = torch.full((batch, top_paths, steps), blank, dtype=integer)
        for sample, found in enumerate(paths):
            for rank, (path, score) in enumerate(found):
                scores[sample, rank], sizes[sample, rank] = score, len(path)
                labels[sample, rank, : len(path)] = torch.tensor(path, dtype=integer)
    return from_host(scores.to(probs.dtype)), from_host(sizes), from_host(labels)


class _Beams(NamedTuple):
    """Label sequences, and log-probabilities [beams] of their alignments that end in a blank or in the last label."""

    labels: List[_Labels]
    in_blank: torch.Tensor
    in_label: torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        """Log-probability of each label sequence."""
        return torch.logaddexp(self.in_blank, self.in_label)


def _decode(log_probs: torch.Tensor, blank: int, beam_width: int) -> List[Tuple[_Labels, float]]:
    """Return the label sequences of one sample, best first; log_probs is [steps, classes] float64."""
    beams = _Beams([()], torch.zeros(1, dtype=torch.float64), torch.full((1,), _IMPOSSIBLE, dtype=torch.float64))
    for step in log_probs:
        beams = _extend(beams, step, blank, beam_width)
    total = beams.total
    order = torch.argsort(total, descending=True, stable=True).tolist()
    return [(beams.labels[index], float(total[index])) for index in order if total[index] > _IMPOSSIBLE]


def _extend(beams: _Beams, step: torch.Tensor, blank: int, beam_width: int) -> _Beams:
    """Return the best beams after one more step; step is [classes]."""
    count, classes = len(beams.labels), step.shape[0]
    last = torch.tensor([labels[-1] if labels else blank for labels in beams.labels], dtype=torch.long)
    has_last = torch.tensor([bool(labels) for labels in beams.labels], dtype=torch.bool)
    stays_in_blank = beams.total + step[blank]
    stays_in_label = torch.where(has_last, beams.in_label + step[last], torch.full_like(step[last], _IMPOSSIBLE))
    grows = beams.total[:, None] + step[None, :]
    # A repeated label extends the sequence only after a blank.
    repeated = has_last.nonzero().flatten()
    grows[repeated, last[repeated]] = beams.in_blank[repeated] + step[last[repeated]]
    grows[:, blank] = _IMPOSSIBLE
    place: Dict[_Labels, int] = {labels: index for index, labels in enumerate(beams.labels)}
    for index, labels in enumerate(beams.labels):
        parent = place.get(labels[:-1]) if labels else None
        if parent is not None:  # extending the parent by the last label gives this beam
            stays_in_label[index] = torch.logaddexp(stays_in_label[index], grows[parent, labels[-1]])
            grows[parent, labels[-1]] = _IMPOSSIBLE
    candidates = torch.cat([torch.logaddexp(stays_in_blank, stays_in_label), grows.flatten()])
    best = torch.topk(candidates, min(beam_width, int((candidates > _IMPOSSIBLE).sum()))).indices.tolist()
    kept = [index for index in best if index < count]
    grown = [divmod(index - count, classes) for index in best if index >= count]
    impossible = torch.full((len(grown),), _IMPOSSIBLE, dtype=torch.float64)
    return _Beams(
        [beams.labels[index] for index in kept] + [(*beams.labels[index], label) for index, label in grown],
        torch.cat([stays_in_blank[kept], impossible]),
        torch.cat([stays_in_label[kept], candidates[[index for index in best if index >= count]]]),
    )


def _check(probs: torch.Tensor, lengths: torch.Tensor, blank: int, beam_width: int, top_paths: int) -> None:
    op = "ctc_beam_search_decoder"
    checked_tensor(op, "probs", probs)
    checked_tensor(op, "lengths", lengths)
    if probs.dim() != 3 or not probs.is_floating_point():
        raise ArgumentError(
            f"poptorch.{op}: `probs` must be floating point [input length, batch, classes], not {Signature.of([probs])}"
        )
    steps, batch, classes = probs.shape
    if lengths.shape != (batch,) or lengths.is_floating_point():
        raise ArgumentError(f"poptorch.{op}: `lengths` must be [{batch}] integers, not {Signature.of([lengths])}")
    if batch and not 0 <= int(lengths.min()) <= int(lengths.max()) <= steps:
        raise ArgumentError(
            f"poptorch.{op}: `lengths` must be in 0...{steps}, the input length, not {lengths.tolist()}"
        )
    checked_int(op, "beam_width", beam_width, minimum=1)
    checked_int(op, "top_paths", top_paths, minimum=1)
    if top_paths > beam_width:
        raise ArgumentError(f"poptorch.{op}: top_paths={top_paths} is more than beam_width={beam_width}")
    if checked_int(op, "blank", blank, minimum=0) >= classes:
        raise ArgumentError(f"poptorch.{op}: `blank` is {blank}, but there are {classes} classes")
