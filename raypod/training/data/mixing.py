"""Mixup and cutmix: what the host draws for the pairs of samples of a micro-batch, and the mixture on the device.

As in Graphcore's CNN application. Mixup (Zhang et al. 2018) adds to each image the one before it in its micro-batch;
cutmix (Yun et al. 2019) pastes a rectangle of another one, with mixup of the one before that. The random numbers of a
pair are a function of (seed, epoch, sample, partner), so the mixture is the same for every placement.
"""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import numpy as np
import torch
from torch import nn

from raypod.plan.config import DataSection
from raypod.training.data.order import pair_fractions

_LEVELS = 2048  # coefficients are multiples of its inverse, which half represents exactly from 0.5 to 1
_MIXUP_DRAW, _CUTMIX_DRAW = 0, 1  # of the random numbers of a pair: the first one of each
_BETA_DRAWS, _BOX_DRAWS = 2, 4  # per attempt, and per pair
_ATTEMPT = 16  # draws between two attempts
_BOX = 5  # columns: first row, end of the rows, first column, end of the columns, share of the pixels


class Mixed(Tuple[torch.Tensor, torch.Tensor]):
    """Images [n, channels, height, width] and the words of their pairs, as the first input of a network."""


def cutmix_shift(data: DataSection) -> int:
    """Return the distance in the micro-batch between an image and the one that cutmix pastes from."""
    return 2 if data.mixup_alpha else 1


def pair_words(
    data: DataSection, samples: np.ndarray, micro_batch: int, seed_and_epoch: Tuple[int, int], size: Tuple[int, int]
) -> Optional[np.ndarray]:
    """Return what the device needs to mix the images of a call: float32 [len(samples), columns].

    The columns are the coefficient of mixup, if there is mixup, and the box of cutmix, if there is cutmix.

    Args:
        samples: indices in the order of the batch, whose micro-batches follow each other; int64.
        size: height and width of the images that are mixed.

    Returns:
        None: the section has neither.
    """
    by_batch, columns = samples.reshape(-1, micro_batch), []

    def partners(shift: int) -> np.ndarray:
        return np.roll(by_batch, shift, axis=1).reshape(-1)

    if data.mixup_alpha:
        columns.append(_coefficients(data.mixup_alpha, samples, partners(1), seed_and_epoch)[:, None])
    if data.has_cutmix:
        fractions = pair_fractions(seed_and_epoch, samples, partners(cutmix_shift(data)), _CUTMIX_DRAW, _BOX_DRAWS)
        columns.append(_boxes(data, fractions, size))
    return np.concatenate(columns, axis=1, dtype=np.float32) if columns else None


def _coefficients(
    alpha: float, samples: np.ndarray, partners: np.ndarray, seed_and_epoch: Tuple[int, int]
) -> np.ndarray:
    """Return the larger of x and 1 - x for x of the distribution Beta(alpha, alpha): float64 [len(samples)].

    By Joehnk's method (1964): u^(1/alpha) / (u^(1/alpha) + v^(1/alpha)) for uniform u and v with a denominator of at
    most 1; in logarithms, as the powers of a small alpha are below the smallest number.
    """
    found = np.zeros(len(samples))
    missing = np.arange(len(samples))
    attempt = 0
    while len(missing):
        draw = _MIXUP_DRAW + attempt * _ATTEMPT
        fractions = pair_fractions(seed_and_epoch, samples[missing], partners[missing], draw, _BETA_DRAWS)
        first, second = np.log(fractions.T) / alpha
        is_accepted = np.logaddexp(first, second) <= 0
        found[missing[is_accepted]] = 1 / (1 + np.exp(-np.abs(first - second)[is_accepted]))
        missing, attempt = missing[~is_accepted], attempt + 1
    rounded: np.ndarray = np.rint(found * _LEVELS) / _LEVELS
    return rounded


def _boxes(data: DataSection, fractions: np.ndarray, size: Tuple[int, int]) -> np.ndarray:
    """Return the boxes of cutmix, float64 [len(fractions), 5]; an empty one is at 0.

    Args:
        fractions: random numbers in (0, 1), float64 [samples, 4].
    """
    low, high = data.cutmix_lambda_low, data.cutmix_lambda_high
    is_cut = fractions[:, 0] >= data.cutmix_disable_prob
    side = np.sqrt(1 - (low + (high - low) * fractions[:, 1])) * is_cut  # of the box, as a fraction of the image's
    boxes = np.zeros((len(fractions), _BOX))
    for axis, length in enumerate(size):
        first = (1 - side) * length * fractions[:, 2 + axis]
        boxes[:, 2 * axis], boxes[:, 2 * axis + 1] = np.rint(first), np.rint(first + side * length)
    boxes[:, -1] = (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2]) / (size[0] * size[1])
    boxes[boxes[:, -1] == 0] = 0
    return boxes


class Mixing(nn.Module):
    """The input of a network on the device: `prepare`, then the mixture of a training batch.

    Args:
        data: the section of the config.
        prepare: maps the images of the host to those of the network.
    """

    def __init__(self, data: DataSection, prepare: nn.Module) -> None:
        super().__init__()
        self.prepare, self._data = prepare, data

    def forward(self, inputs: Any) -> torch.Tensor:
        """Map images, or `Mixed` of them and the words of `pair_words`, to images [n, channels, height, width]."""
        images: torch.Tensor = self.prepare(inputs[0] if isinstance(inputs, Mixed) else inputs)
        if not isinstance(inputs, Mixed):
            return images
        words = inputs[1]
        if self._data.mixup_alpha:
            kept = words[:, :1].to(images.dtype)[:, :, None, None]
            images = images * kept + _before(images, 1) * (1 - kept)
        if self._data.has_cutmix:
            box = words[:, -_BOX:]
            rows = _is_between(box[:, 0:1], box[:, 1:2], images.shape[2])[:, None, :, None]
            columns = _is_between(box[:, 2:3], box[:, 3:4], images.shape[3])[:, None, None, :]
            images = torch.where(rows & columns, _before(images, cutmix_shift(self._data)), images)
        return images


def weighted_labels(
    data: DataSection, labels: torch.Tensor, words: torch.Tensor
) -> List[Tuple[torch.Tensor, torch.Tensor]]:
    """Return the labels of the images in a mixture, each with its share of the mixture: float32 [n]."""
    if not data.mixup_alpha:
        pasted = words[:, -1]
        return [(labels, 1 - pasted), (_before(labels, 1), pasted)]
    kept = words[:, 0]
    mixed = [(labels, kept), (_before(labels, 1), 1 - kept)]
    if not data.has_cutmix:
        return mixed
    pasted, shift = words[:, -1], cutmix_shift(data)
    below = [(each, share * (1 - pasted)) for each, share in mixed]
    return below + [(_before(each, shift), _before(share, shift) * pasted) for each, share in mixed]


def _before(values: torch.Tensor, shift: int) -> torch.Tensor:
    """Return for each sample the value of the one `shift` places before it in the micro-batch."""
    return torch.roll(values, shifts=shift, dims=0)


def _is_between(first: torch.Tensor, end: torch.Tensor, length: int) -> torch.Tensor:
    """Return which of the places 0 to length - 1 are in [first, end), float32 [n, 1]: bool [n, length]."""
    places = torch.arange(length, dtype=torch.float32, device=first.device)[None]
    return (places >= first) & (places < end)
