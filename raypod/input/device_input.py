"""The first thing a replica does with images: cast, normalise and enlarge them, where that is left to the device.

With 8-bit IO images cross the wire as uint8, a quarter of the bytes (contract section 5), and small.
"""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch
from torch import nn
from torch.nn import functional


def device_input(
    dtype: torch.dtype, mean: Sequence[float], std: Sequence[float], sent: Tuple[int, int], size: Optional[int]
) -> nn.Module:
    """What stands before the network.

    Args:
        dtype: what the network computes in.
        mean, std: of images scaled to [0, 1]: one value, or one per channel.
        sent: height and width of the images that are sent.
        size: height and width that the network sees; None: those that are sent.
    """
    normalisation = OnDeviceNormalisation(dtype, mean, std)
    if size is None or sent == (size, size):
        return normalisation
    return nn.Sequential(normalisation, OnDeviceResize(dtype, sent, size))


def normalisation_factors(mean: Sequence[float], std: Sequence[float]) -> Tuple[torch.Tensor, torch.Tensor]:
    """(scale, offset), float32 [1, channels or 1, 1, 1]: uint8 images times scale minus offset are normalised."""
    scale = torch.tensor([1 / (255 * each) for each in std], dtype=torch.float32)
    offset = torch.tensor([mid / each for mid, each in zip(mean, std)], dtype=torch.float32)
    return scale.reshape(1, -1, 1, 1), offset.reshape(1, -1, 1, 1)


class OnDeviceNormalisation(nn.Module):
    """Casts uint8 images to the compute type, scales and normalises them; others are passed on as they are."""

    scale: torch.Tensor
    offset: torch.Tensor

    def __init__(self, dtype: torch.dtype, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.dtype = dtype
        scale, offset = normalisation_factors(mean, std)
        self.register_buffer("scale", scale.to(dtype), persistent=False)
        self.register_buffer("offset", offset.to(dtype), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 or floating [n, c, h, w] to floating [n, c, h, w]."""
        if images.dtype != torch.uint8:
            return images
        normalised: torch.Tensor = images.to(self.dtype) * self.scale - self.offset
        return normalised


class OnDeviceResize(nn.Module):
    """Enlarges images bilinearly, as two products with small matrices: what a device multiplies best.

    The host's resize (`transforms.resize`) rounds to whole levels, twice: they differ by one at most.
    """

    rows: torch.Tensor
    columns: torch.Tensor

    def __init__(self, dtype: torch.dtype, sent: Tuple[int, int], size: int) -> None:
        super().__init__()
        height, width = (_interpolation(side, size).to(dtype) for side in sent)
        self.register_buffer("rows", height.T.contiguous(), persistent=False)
        self.register_buffer("columns", width, persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Floating [n, c, h, w] to floating [n, c, size, size]."""
        return torch.matmul(self.rows, torch.matmul(images, self.columns))


def _interpolation(side: int, size: int) -> torch.Tensor:
    """[side, size]: a line of `side` pixels times this matrix is the line enlarged to `size`."""
    return functional.interpolate(torch.eye(side)[None], size, mode="linear", align_corners=False)[0]
