"""A limit of the pixels of an image file: a small file can describe an image that does not fit into memory."""

from __future__ import annotations

from typing import Any


class TooManyPixels(OSError):
    """An image is larger than `data.max_image_pixels`."""


def check_pixels(height: int, width: int, max_pixels: int) -> None:
    """Raise TooManyPixels if an image is too large to be decoded."""
    if height * width > max_pixels:
        raise TooManyPixels(f"it has {height} x {width} pixels, more than --max-image-pixels {max_pixels}")


def open_image(source: Any, max_pixels: int) -> Any:
    """Return a Pillow image whose pixels are not decoded yet.

    Args:
        source: a path, or a file object.
        max_pixels: the limit, in place of Pillow's own.

    Raises:
        TooManyPixels: the image is too large.
        OSError: Pillow does not recognize its format.
    """
    from PIL import Image, UnidentifiedImageError  # planning works without Pillow

    own = Image.MAX_IMAGE_PIXELS
    if own is not None and own < max_pixels:  # Pillow refuses more than twice its limit before it returns the size
        Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        image = Image.open(source)
    except UnidentifiedImageError:
        raise OSError("Pillow does not recognize its format") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise TooManyPixels(f"{error}; --max-image-pixels is {max_pixels}") from None
    try:
        check_pixels(image.height, image.width, max_pixels)
    except OSError:
        image.close()
        raise
    return image
