"""The first thing a replica does with images: cast, normalise and resize them, where that is left to the device.

With 8-bit IO images cross the wire as uint8, a quarter of the bytes (contract section 5), and small.
"""

from __future__ import annotations

from typing import Sequence, Tuple

import torch
from torch import nn


def normalisation_factors(mean: Sequence[float], std: Sequence[float]) -> Tuple[torch.Tensor, torch.Tensor]:
    """(scale, offset), float32 [1, channels or 1, 1, 1]: uint8 images times scale minus offset are normalised."""
    scale = torch.tensor([1 / (255 * each) for each in std], dtype=torch.float32)
    offset = torch.tensor([mid / each for mid, each in zip(mean, std)], dtype=torch.float32)
    return scale.reshape(1, -1, 1, 1), offset.reshape(1, -1, 1, 1)


class OnDeviceNormalisation(nn.Module):
    """Casts uint8 images to the compute type, scales and normalises them; others are passed on as they are.

    Args:
        dtype: what the network computes in.
        mean, std: of images scaled to [0, 1]: one value, or one per channel.
    """

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
