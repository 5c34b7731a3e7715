"""What happens to the images of arrays on the host: gather, crop, flip, resize and normalise, a whole batch at a time.

Always in this order, on uint8 [samples, channels, height, width]. The random numbers of a sample are a function of
(seed, epoch, sample), so that neither instance nor thread nor batch can be told from the result.
"""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import nn
from torch.nn import functional

from raypod.datasets.arrays import ArrayDataset, Augmentation
from raypod.datasets.order import augmentation_integers

_CHUNK = 64  # images that are worked on together: their steps meet in the cache
_LOW_BITS = np.uint64(0x7F7F7F7F7F7F7F7F)  # of eight bytes that are halved as one word


def gather(
    data: ArrayDataset,
    samples: np.ndarray,
    augmentation: Augmentation,
    seed_and_epoch: Optional[Tuple[int, int]],
    size: Optional[int] = None,
) -> Tuple[np.ndarray, np.ndarray]:
    """Images uint8 [len(samples), channels, height, width] and labels int64 [len(samples)] of some samples.

    Args:
        seed_and_epoch: of the random numbers; None leaves the images as they are.
        size: height and width to resize to.
    """
    height, width = data.images.shape[2:]
    target = (height, width) if size is None else (size, size)
    images = np.empty((len(samples), data.images.shape[1], *target), dtype=np.uint8)
    for first in range(0, len(samples), _CHUNK):
        chunk = samples[first : first + _CHUNK]
        part = data.images[chunk]
        if seed_and_epoch is not None:
            part = augment(part, chunk, augmentation, seed_and_epoch)
        images[first : first + _CHUNK] = resize(part, target)
    return images, data.labels[samples]


def augment(
    images: np.ndarray, samples: np.ndarray, augmentation: Augmentation, seed_and_epoch: Tuple[int, int]
) -> np.ndarray:
    """Crop and flip each image by random numbers of its sample; the images may be changed in place."""
    seed, epoch = seed_and_epoch
    if augmentation.padding:
        bounds = 2 * augmentation.padding + 1
        images = crop(images, augmentation_integers(seed, epoch, samples, bounds, 2), augmentation.padding)
    if augmentation.flip:
        images = flip(images, augmentation_integers(seed, epoch, samples, 2, 3)[:, 2].astype(bool))
    return images


def crop(images: np.ndarray, offsets: np.ndarray, padding: int) -> np.ndarray:
    """Of each image with `padding` zeros around it, the piece of its own size at (row, column) in 0..2*padding."""
    count, channels, height, width = images.shape
    padded = np.zeros((count, channels, height + 2 * padding, width + 2 * padding), dtype=images.dtype)
    padded[:, :, padding : padding + height, padding : padding + width] = images
    pieces = sliding_window_view(padded, (height, width), axis=(2, 3))
    cropped: np.ndarray = pieces[np.arange(count), :, offsets[:, 0], offsets[:, 1]]
    return cropped


def flip(images: np.ndarray, flipped: np.ndarray) -> np.ndarray:
    """Mirror the images where `flipped` (bool [samples]) is true, left to right, in place."""
    images[flipped] = images[flipped][..., ::-1]
    return images


def resize(images: np.ndarray, target: Tuple[int, int]) -> np.ndarray:
    """Bilinear, antialiased where it shrinks, to (height, width): as Pillow does, one level apart at most."""
    height, width = images.shape[2:]
    if (height, width) == target:
        return images
    if (2 * height, 2 * width) == target and width % 4 == 0:
        return _double(images)
    bytes_in = torch.from_numpy(np.ascontiguousarray(images))
    resized = functional.interpolate(bytes_in, target, mode="bilinear", antialias=True, align_corners=False)
    found: np.ndarray = resized.numpy()
    return found


def _double(images: np.ndarray) -> np.ndarray:
    """`resize` to twice the size, about twice as fast, with the very bytes of Pillow: first the width, then the height.

    A new pixel between its nearer neighbour b and its farther one a is (a + 3b + 2) // 4. Pixels are worked on as if
    all images were one line, and the borders, where a is b, are put right afterwards.
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
    left |= right  # two bytes that lie side by side (all our hosts are little-endian)
    wide = left.view(np.uint8).reshape(count * channels, height, 2 * width)
    wide[..., 0] = images[..., 0].reshape(-1, height)
    wide[..., -1] = images[..., -1].reshape(-1, height)

    # Eight pixels in a word. (a + 3b + 2) // 4 is the mean of (the mean of a and b, rounded down) and b, rounded up.
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


def normalise(
    images: torch.Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """uint8 [n, c, h, w] to mean 0 and deviation 1, computed in float32; `mean` and `std` as in `Splits`."""
    scale, offset = normalisation_factors(mean, std)
    normalised = torch.empty(images.shape, dtype=dtype)
    for first in range(0, len(images), _CHUNK):
        chunk = slice(first, first + _CHUNK)
        normalised[chunk] = images[chunk].to(torch.float32).mul_(scale).sub_(offset)
    return normalised


# --- from input.device_input: The first thing a replica does with images: cast, normalise and enlarge them, where that is left to the device.
#
# With 8-bit IO images cross the wire as uint8, a quarter of the bytes (contract section 5), and small.
#


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
