"""Image transforms: on the host a whole batch at a time, and as the first module of a replica.

The host transforms uint8 images [samples, channels, height, width]: crop, flip, resize, normalize, in this order. The
random numbers of a sample are a function of (seed, epoch, sample). With 8-bit IO images are sent to the device as
uint8, a quarter of the bytes of float32, and the replica casts, normalizes and enlarges them.
"""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import nn
from torch.nn import functional

from raypod.training.data.arrays import ArrayDataset, Augmentation
from raypod.training.data.order import augmentation_integers

_CHUNK = 64  # images per step: their intermediate results fit into the CPU cache
_LOW_BITS = np.uint64(0x7F7F7F7F7F7F7F7F)  # the low 7 bits of each of 8 bytes


def gather(
    data: ArrayDataset,
    samples: np.ndarray,
    augmentation: Augmentation,
    seed_and_epoch: Optional[Tuple[int, int]],
    size: Optional[int] = None,
) -> Tuple[np.ndarray, np.ndarray]:
    """Return images uint8 [len(samples), channels, height, width] and labels int64 [len(samples)].

    Args:
        samples: indices, int64.
        seed_and_epoch: of the random numbers; None disables the augmentation.
        size: height and width to resize to; None keeps the size.
    """
    height, width = data.images.shape[2:]
    target = (height, width) if size is None else (size, size)
    images = np.empty((len(samples), data.images.shape[1], *target), dtype=np.uint8)
    for first in range(0, len(samples), _CHUNK):
        chunk = samples[first : first + _CHUNK]
        originals = data.images[chunk]
        if seed_and_epoch is not None:
            originals = augment(originals, chunk, augmentation, seed_and_epoch)
        images[first : first + _CHUNK] = resize(originals, target)
    return images, data.labels[samples]


def augment(
    images: np.ndarray, samples: np.ndarray, augmentation: Augmentation, seed_and_epoch: Tuple[int, int]
) -> np.ndarray:
    """Crop and flip each image by the random numbers of its sample; may modify `images` in place."""
    seed, epoch = seed_and_epoch
    if augmentation.padding:
        bounds = 2 * augmentation.padding + 1
        images = crop(images, augmentation_integers(seed, epoch, samples, bounds, 2), augmentation.padding)
    if augmentation.flip:
        images = flip(images, augmentation_integers(seed, epoch, samples, 2, 3)[:, 2].astype(bool))
    return images


def crop(images: np.ndarray, offsets: np.ndarray, padding: int) -> np.ndarray:
    """Pad each image with `padding` zeros on each side and crop it to its original size.

    `offsets` is int64 [samples, 2 or more]: the row and column of the crop, in 0..2*padding.
    """
    count, channels, height, width = images.shape
    padded = np.zeros((count, channels, height + 2 * padding, width + 2 * padding), dtype=images.dtype)
    padded[:, :, padding : padding + height, padding : padding + width] = images
    windows = sliding_window_view(padded, (height, width), axis=(2, 3))
    return windows[np.arange(count), :, offsets[:, 0], offsets[:, 1]]


def flip(images: np.ndarray, flipped: np.ndarray) -> np.ndarray:
    """Flip the images where `flipped` (bool [samples]) is true horizontally, in place."""
    images[flipped] = images[flipped][..., ::-1]
    return images


def resize(images: np.ndarray, target: Tuple[int, int]) -> np.ndarray:
    """Resize to (height, width), bilinearly and with antialiasing; pixels differ from Pillow's by at most 1."""
    height, width = images.shape[2:]
    if (height, width) == target:
        return images
    if (2 * height, 2 * width) == target and width % 4 == 0:
        return _double(images)
    bytes_in = torch.from_numpy(np.ascontiguousarray(images))
    resized = functional.interpolate(bytes_in, target, mode="bilinear", antialias=True, align_corners=False)
    return resized.numpy()


def _double(images: np.ndarray) -> np.ndarray:
    """Resize to twice the size, about twice as fast as `resize`; bit-identical to Pillow.

    First the width is doubled, then the height. A new pixel between its nearer neighbor b and its farther neighbor a is
    (a + 3b + 2) // 4. All images are processed as one line of pixels; the borders, where a is b, are corrected after.
    """
    count, channels, height, width = images.shape
    pixels = images.astype(np.uint16, order="C").reshape(-1)
    sums = pixels[1:] + pixels[:-1]
    right = pixels << 1
    right += 2
    left = right.copy()
    left[1:] += sums
    left >>= 2
    right[:-1] += sums
    right <<= 6
    right &= 0xFF00
    left |= right  # two adjacent bytes, on a little-endian host
    wide = left.view(np.uint8).reshape(count * channels, height, 2 * width)
    wide[..., 0] = images[..., 0].reshape(-1, height)
    wide[..., -1] = images[..., -1].reshape(-1, height)

    # Eight pixels per word. (a + 3b + 2) // 4 is the mean, rounded up, of b and (the mean of a and b, rounded down).
    lines = wide.view(np.uint64).reshape(count * channels * height, -1)
    above, below = lines[:-1], lines[1:]
    means = ((above ^ below) >> np.uint64(1)) & _LOW_BITS
    means += above & below
    doubled = np.empty((count, channels, 2 * height, 2 * width), dtype=np.uint8)
    new_lines = doubled.view(np.uint64).reshape(len(lines), 2, -1)
    for nearer, place in ((below, new_lines[1:, 0]), (above, new_lines[:-1, 1])):
        np.subtract(means | nearer, ((means ^ nearer) >> np.uint64(1)) & _LOW_BITS, out=place)
    planes = doubled.reshape(count * channels, 2 * height, 2 * width)
    planes[:, 0], planes[:, -1] = wide[:, 0], wide[:, -1]
    return doubled


def normalize(
    images: torch.Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Normalize uint8 [n, c, h, w] to mean 0 and standard deviation 1, computed in float32.

    `mean` and `std` are those of `Splits`.
    """
    scale, offset = normalization_factors(mean, std)
    # Not `torch.empty`: this runs in a thread, and PopTorch replaces torch's factory functions while a model compiles.
    normalized = images.new_empty(images.shape, dtype=dtype)
    for first in range(0, len(images), _CHUNK):
        chunk = slice(first, first + _CHUNK)
        normalized[chunk] = images[chunk].to(torch.float32).mul_(scale).sub_(offset)
    return normalized


def activation_dtype(precision: str) -> torch.dtype:
    """Return the dtype of activations: of `training.precision` "16.16", "16.32" or "32.32" the first number."""
    return torch.float16 if precision.startswith("16") else torch.float32


def device_input(
    dtype: torch.dtype, mean: Sequence[float], std: Sequence[float], sent: Tuple[int, int], size: Optional[int]
) -> nn.Module:
    """Return the module that transforms images on the device, before the network.

    Args:
        dtype: of the network's activations.
        mean, std: of images scaled to [0, 1]; one value, or one per channel.
        sent: height and width of the images that the host sends.
        size: height and width of the network's input; None keeps `sent`.
    """
    normalization = OnDeviceNormalization(dtype, mean, std)
    if size is None or sent == (size, size):
        return normalization
    return nn.Sequential(normalization, OnDeviceResize(dtype, sent, size))


def normalization_factors(mean: Sequence[float], std: Sequence[float]) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return (scale, offset), float32 [1, channels or 1, 1, 1]: normalized images are `images * scale - offset`."""
    scale = np.array([1 / (255 * each) for each in std], dtype=np.float32)
    offset = np.array([mid / each for mid, each in zip(mean, std)], dtype=np.float32)
    return torch.from_numpy(scale.reshape(1, -1, 1, 1)), torch.from_numpy(offset.reshape(1, -1, 1, 1))


class OnDeviceNormalization(nn.Module):
    """Cast uint8 images to `dtype` and normalize them; return other images unchanged."""

    scale: torch.Tensor
    offset: torch.Tensor

    def __init__(self, dtype: torch.dtype, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.dtype = dtype
        scale, offset = normalization_factors(mean, std)
        self.register_buffer("scale", scale.to(dtype), persistent=False)
        self.register_buffer("offset", offset.to(dtype), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map uint8 or floating [n, c, h, w] to floating [n, c, h, w]."""
        if images.dtype != torch.uint8:
            return images
        return images.to(self.dtype) * self.scale - self.offset


class OnDeviceResize(nn.Module):
    """Enlarge images bilinearly by two matrix products, which are fast on the device.

    The host's `resize` rounds to integers twice: the results differ by at most 1 of 255.
    """

    rows: torch.Tensor
    columns: torch.Tensor

    def __init__(self, dtype: torch.dtype, sent: Tuple[int, int], size: int) -> None:
        super().__init__()
        height, width = (_interpolation(side, size).to(dtype) for side in sent)
        self.register_buffer("rows", height.T.contiguous(), persistent=False)
        self.register_buffer("columns", width, persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map floating [n, c, h, w] to floating [n, c, size, size]."""
        return torch.matmul(self.rows, torch.matmul(images, self.columns))


def _interpolation(side: int, size: int) -> torch.Tensor:
    """Return the matrix [side, size] that enlarges a line of `side` pixels to `size` pixels."""
    return functional.interpolate(torch.eye(side)[None], size, mode="linear", align_corners=False)[0]
