"""From the bytes of an image file to a sample: decoded, cropped, resized and flipped, by Pillow or by simplejpeg.

Both draw the same crops and flips, with torch's global random numbers in the order of torchvision's transforms.
"""

from __future__ import annotations

import abc
import importlib
import io
import math
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple, Type

import numpy as np
import torch
from torch.nn import functional

from raypod.errors import ConfigError
from raypod.plan.config import MAX_IMAGE_PIXELS, DataSection
from raypod.system import torchvision_import
from raypod.training.data.bounding_boxes import WHOLE, Box, is_covered
from raypod.training.data.pixels import check_pixels, eight_bit, open_image

torchvision_import.install()
from torchvision import transforms  # noqa: E402 - needs the import hook above

_RESIZE = 256 / 224  # before the center crop of evaluation (He et al. 2016)
_CROPS = 10  # drawn at most, until one has enough of the object; and sizes of a crop, until one fits into the image
_AREAS, _RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)  # of random crops: shares of the image, and widths in heights
_LOG_RATIOS = torch.log(torch.tensor(_RATIOS)).tolist()
_FACTORS = (8, 4, 2)  # by which libjpeg-turbo reduces an image while it decodes it; others are not faster
_BLOCK_ROWS, _NEIGHBORS = 32, 4  # of pixels: at most in a coded unit, and below a pixel that its color depends on
_SEQUENTIAL, _SCAN, _END = (0xC0, 0xC1), 0xDA, b"\xff\xd9"  # markers of a JPEG file
_OTHER_FRAMES = (*range(0xC2, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0))


class Window(NamedTuple):
    """What becomes of an image: a part of it is resized, a square is cut from that, and flipped.

    Attributes:
        top, left, height, width: the part, in pixels of the image.
        rows, columns: the size of the resized part.
        first_row, first_column: where the square begins in it.
    """

    top: int
    left: int
    height: int
    width: int
    rows: int
    columns: int
    first_row: int
    first_column: int
    is_flipped: bool


class Preparation(abc.ABC):
    """Makes the sample of an image, uint8 [3, side, side].

    Args:
        side: height and width of the samples.
        is_random: random resized crops; otherwise the center of the resized image.
        flips: flip half of the random crops.
        max_pixels: of an image; a larger one is refused before it is decoded.
    """

    def __init__(self, side: int, is_random: bool, flips: bool, max_pixels: int = MAX_IMAGE_PIXELS) -> None:
        self._side, self._is_random, self._flips, self._max_pixels = side, is_random, flips, max_pixels

    @abc.abstractmethod
    def __call__(self, image: Any, box: Box = WHOLE) -> torch.Tensor:
        """Return the sample of a Pillow image, whose random crop is drawn again if it has too little of the box."""

    def decode(self, data: bytes, box: Box = WHOLE) -> torch.Tensor:
        """Return the sample of an image file, as `__call__`. Any exception if it is damaged."""
        return self(_decoded_by_pillow(data, self._max_pixels), box)


class PillowPreparation(Preparation):
    """Decodes and resizes with Pillow, as torchvision does."""

    def __init__(self, side: int, is_random: bool, flips: bool, max_pixels: int = MAX_IMAGE_PIXELS) -> None:
        super().__init__(side, is_random, flips, max_pixels)
        flip = [transforms.RandomHorizontalFlip()] if flips else []
        center = [transforms.Resize(round(side * _RESIZE)), transforms.CenterCrop(side)]
        self._transform = transforms.Compose([*(flip if is_random else center), transforms.PILToTensor()])

    def __call__(self, image: Any, box: Box = WHOLE) -> torch.Tensor:
        image = eight_bit(image, "RGB")
        if self._is_random:
            crop = _drawn_crop(image.height, image.width, box)
            image = transforms.functional.resized_crop(image, *crop, [self._side, self._side])
        sample: torch.Tensor = self._transform(image)
        return sample


class SimplejpegPreparation(Preparation):
    """Decodes JPEG files with simplejpeg, and resizes with torch.

    An image whose part is at least twice as large as the sample is reduced while it is decoded, to 1/2, 1/4 or 1/8 of
    its sides. Decoding ends below the part. Files that simplejpeg does not decode are left to Pillow: other formats,
    CMYK, damaged files.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, side: int, is_random: bool, flips: bool, max_pixels: int = MAX_IMAGE_PIXELS) -> None:
        super().__init__(side, is_random, flips, max_pixels)
        _simplejpeg()

    def __call__(self, image: Any, box: Box = WHOLE) -> torch.Tensor:
        pixels = np.asarray(eight_bit(image, "RGB"))
        height, width = pixels.shape[:2]
        return _cut(pixels, self._window(height, width, box), 1, self._side)

    def decode(self, data: bytes, box: Box = WHOLE) -> torch.Tensor:
        size = _size_of_jpeg(data)
        if size is None:
            return super().decode(data, box)
        check_pixels(*size, self._max_pixels)
        window = self._window(*size, box)
        factor = next((each for each in _FACTORS if _reduced_by(each, window)), 1)
        height = min(size[0], -(-(window.top + window.height + _NEIGHBORS) // _BLOCK_ROWS) * _BLOCK_ROWS)
        shortened = None if height == size[0] else _shortened(data, height)
        height = size[0] if shortened is None else height
        least = {"min_height": -(-height // factor), "min_width": -(-size[1] // factor)}
        try:  # the rest of a shortened file is a warning, which is an error if it is strict
            pixels = _simplejpeg().decode_jpeg(shortened or data, "RGB", strict=shortened is None, **least)
        except ValueError:  # also what other decoders only warn of
            factor, pixels = 1, np.asarray(eight_bit(_decoded_by_pillow(data, self._max_pixels), "RGB"))
        return _cut(pixels, window, factor, self._side)

    def _window(self, height: int, width: int, box: Box) -> Window:
        """Return the window of an image; draws as torchvision's RandomResizedCrop and RandomHorizontalFlip."""
        side = self._side
        if self._is_random:
            top, left, rows, columns = _drawn_crop(height, width, box)
            is_flipped = self._flips and torch.rand(1).item() < 0.5
            return Window(top, left, rows, columns, side, side, 0, 0, is_flipped)
        shorter = round(side * _RESIZE)
        longer = int(shorter * max(height, width) / min(height, width))
        rows, columns = (shorter, longer) if height <= width else (longer, shorter)
        first_row, first_column = (int(round((length - side) / 2.0)) for length in (rows, columns))
        return Window(0, 0, height, width, rows, columns, first_row, first_column, False)


class FurtherChanged(Preparation):
    """A preparation whose samples torchvision changes further, with random numbers of torch's global generator.

    Args:
        first: makes the samples.
        data: the section of the config, whose policy is applied before the random erasing.
        mean: of images scaled to [0, 1], with which rectangles are erased: one value per channel.
    """

    def __init__(self, first: Preparation, data: DataSection, mean: Sequence[float]) -> None:
        self._first, steps = first, []
        if data.policy == "rand-augment":
            steps.append(transforms.RandAugment(data.rand_augment_ops, data.rand_augment_magnitude))
        elif data.policy == "auto-augment":
            steps.append(transforms.AutoAugment())  # the policy for ImageNet
        if data.random_erasing:
            steps.append(transforms.RandomErasing(data.random_erasing, value=[round(255 * each) for each in mean]))
        self._changes = transforms.Compose(steps)

    def __call__(self, image: Any, box: Box = WHOLE) -> torch.Tensor:
        sample: torch.Tensor = self._changes(self._first(image, box))
        return sample

    def decode(self, data: bytes, box: Box = WHOLE) -> torch.Tensor:
        sample: torch.Tensor = self._changes(self._first.decode(data, box))
        return sample


_PREPARATIONS: Dict[str, Type[Preparation]] = {"pillow": PillowPreparation, "simplejpeg": SimplejpegPreparation}


def preparation(
    decoder: str, side: int, is_random: bool, flips: bool, max_pixels: int = MAX_IMAGE_PIXELS
) -> Preparation:
    """Return the preparation with a decoder, "pillow" or "simplejpeg". ConfigError if its package is missing."""
    return _PREPARATIONS[decoder](side, is_random, flips, max_pixels)


def _drawn_crop(height: int, width: int, box: Box) -> Tuple[int, int, int, int]:
    """Return (top, left, rows, columns) of a random crop, which is drawn again if it misses the box."""
    for _ in range(_CROPS):
        crop = _random_crop(height, width)
        if is_covered(crop, height, width, box):
            break
    return crop


def _random_crop(height: int, width: int) -> Tuple[int, int, int, int]:
    """Return what torchvision's `RandomResizedCrop.get_params` returns, which takes 5 % of the time of an image."""
    value = torch.empty(1)
    for _ in range(_CROPS):
        area = height * width * value.uniform_(*_AREAS).item()
        ratio = value.uniform_(*_LOG_RATIOS).exp_().item()
        rows, columns = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < columns <= width and 0 < rows <= height:
            top = int(torch.randint(height - rows + 1, (1,)))
            return top, int(torch.randint(width - columns + 1, (1,))), rows, columns
    least, most = _RATIOS  # the crop in the center of a narrow image
    rows, columns = min(height, round(width / least)), min(width, round(height * most))
    return (height - rows) // 2, (width - columns) // 2, rows, columns


def _simplejpeg() -> Any:
    try:
        return importlib.import_module("simplejpeg")
    except ImportError as error:
        raise ConfigError(
            f"--jpeg-decoder simplejpeg needs the package simplejpeg on every host ({error}): "
            "pip install 'raypod[jpeg]', or use --jpeg-decoder pillow, which computes other bits"
        ) from None


def _decoded_by_pillow(data: bytes, max_pixels: int) -> Any:
    image = open_image(io.BytesIO(data), max_pixels)
    image.load()
    return image


def _size_of_jpeg(data: bytes) -> Optional[Tuple[int, int]]:
    """Return the height and the width of a file that simplejpeg can decode to RGB; None for others."""
    try:
        height, width, color, _ = _simplejpeg().decode_jpeg_header(data)
    except ValueError:
        return None
    return (height, width) if color in ("YCbCr", "Gray", "RGB") else None


def _shortened(data: bytes, height: int) -> Optional[bytearray]:
    """Return a JPEG file of which decoders read only the first `height` rows, whose pixels remain the same.

    None if it is incomplete, or if its rows do not follow each other in one scan, as those of progressive files.
    """
    position, height_at = 2, 0
    try:
        while data[position] == 0xFF:
            marker, length = data[position + 1], int.from_bytes(data[position + 2 : position + 4], "big")
            if marker in _SEQUENTIAL:
                height_at, components = position + 5, data[position + 9]
            elif marker in _OTHER_FRAMES:
                return None
            elif marker == _SCAN:
                if not height_at or data[position + 4] != components or not data.endswith(_END):
                    return None
                shortened = bytearray(data)
                shortened[height_at : height_at + 2] = height.to_bytes(2, "big")
                return shortened
            position += 2 + length
    except IndexError:
        pass  # the file ends before its first scan
    return None


def _reduced_by(factor: int, window: Window) -> bool:
    """Whether the part of the image, reduced by a factor, is at least as large as what it is resized to."""
    return window.height >= factor * window.rows and window.width >= factor * window.columns


def _cut(pixels: np.ndarray, window: Window, factor: int, side: int) -> torch.Tensor:
    """Return uint8 [3, side, side].

    Args:
        pixels: uint8 [height, width, 3], the image reduced by `factor`.
        window: in pixels of the image before its reduction.
    """
    top, left, height, width = window[:4]
    if factor == 1:
        # A copy, because torch 2.0 takes the rows of a view for adjacent; it also makes up for its own time.
        part = _batch_of_one(pixels[top : top + height, left : left + width].copy())
        size = window.rows, window.columns
        resized = functional.interpolate(part, size, mode="bilinear", antialias=True, align_corners=False)
    else:
        resized = _batch_of_one(_resized_by_pillow(pixels, window, factor))
    rows = slice(window.first_row, window.first_row + side)
    columns = slice(window.first_column, window.first_column + side)
    square = resized[0, :, rows, columns]
    return (torch.flip(square, (-1,)) if window.is_flipped else square).contiguous()


def _batch_of_one(pixels: np.ndarray) -> torch.Tensor:
    """Return a view, [1, 3, height, width], of [height, width, 3]; numpy makes it in less time than torch."""
    return torch.from_numpy(pixels.transpose(2, 0, 1)[None])


def _resized_by_pillow(pixels: np.ndarray, window: Window, factor: int) -> np.ndarray:
    """Resize with Pillow, which can begin and end within a pixel, as the reduced part does."""
    from PIL import Image

    left, top = window.left / factor, window.top / factor
    box = (left, top, left + window.width / factor, top + window.height / factor)
    size = (window.columns, window.rows)
    return np.array(Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR, box=box))
