"""From a Pillow image to pixels of 8 bits: one function for training, evaluation and prediction, and what it drops."""

from __future__ import annotations

import base64
import io
import warnings
from typing import Any, Iterator

import numpy as np

_ORIENTATION = 0x0112  # of EXIF
_THUMBNAIL_SIDE = 96  # pixels
_MAX_PNG_BYTES = 6_000  # of a thumbnail; larger ones are JPEG


def eight_bit(image: Any, mode: str) -> Any:
    """Return a Pillow image in a mode with 8 bits per channel: "L", "RGB" or "RGBA".

    Integers of 16 bits are divided by 256, where Pillow would clip them to white. Transparency is dropped: the colors
    below it remain, as with torchvision. EXIF orientations are not applied. Of several frames the current one is used.

    Raises:
        Exception: the file is damaged, or the range of its pixels is unknown.
    """
    if image.mode == mode:
        image.load()
        return image
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of an unknown range: convert it to 8 or 16 bits")
    if image.mode.startswith("I"):
        from PIL import Image  # planning works without Pillow

        pixels = np.asarray(image)
        if pixels.size and not 0 <= pixels.min() <= pixels.max() <= 0xFFFF:
            raise ValueError("its pixels are integers of more than 16 bits: convert it to 8 or 16 bits")
        image = Image.fromarray((pixels >> 8).astype(np.uint8))
    elif "transparency" in image.info:
        image = image.convert("RGBA")  # of a palette with several transparent colors Pillow warns otherwise
    return image.convert(mode)


def lost_of(image: Any) -> Iterator[str]:
    """Yield what `eight_bit` drops of an image in color, for a message. Its pixels need not be loaded."""
    if image.mode == "F":
        yield "with floating-point pixels (cannot be used)"
    elif image.mode.startswith("I") or ";16" in str(image.tile[:1]):
        yield "with more than 8 bits per channel (reduced to 8)"
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        yield "with transparency (dropped)"
    if image.mode == "CMYK":
        yield "in CMYK (converted without a color profile)"
    if getattr(image, "is_animated", False) and image.format != "MPO":  # a camera's JPEG file with a second view
        yield "with several frames (only the first is used)"
    # Pillow reads a PNG file as a whole to look for EXIF after the pixels, and applies the orientation of TIFF itself.
    is_known = image.format != "TIFF" and (image.format != "PNG" or "exif" in image.info)
    if is_known and image.getexif().get(_ORIENTATION, 1) != 1:
        yield "with an EXIF orientation (not applied)"


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
        own = Image.MAX_IMAGE_PIXELS = max_pixels
    if all(each[2] is not Image.DecompressionBombWarning for each in warnings.filters):
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # such an image is refused below
    try:
        image = Image.open(source)
    except UnidentifiedImageError:
        raise OSError("Pillow does not recognize its format") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:  # a filter can raise the warning
        assert own is not None
        most = own if isinstance(error, Image.DecompressionBombWarning) else 2 * own
        raise TooManyPixels(f"it has more than {most} pixels, and --max-image-pixels is {max_pixels}") from None
    try:
        check_pixels(image.height, image.width, max_pixels)
    except OSError:
        image.close()
        raise
    return image


def thumbnail(image: np.ndarray) -> str:
    """Return an image [channels, height, width] as a data URL of a PNG or JPEG with at most 96 x 96 pixels.

    Floating-point pixels are scaled from their smallest and largest finite value. Of images with neither 1 nor 3
    channels, the first channel is shown.
    """
    from PIL import Image  # planning works without Pillow

    pixels = image if len(image) == 3 else image[:1]
    if pixels.dtype != np.uint8:
        values = pixels.astype(np.float64)
        finite = values[np.isfinite(values)]
        low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
        scaled = (np.nan_to_num(values, nan=low, posinf=high, neginf=low) - low) / ((high - low) or 1.0)
        pixels = (255 * scaled).round().astype(np.uint8)
    shown = Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    shown.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE))
    for kind in ("png", "jpeg"):
        file = io.BytesIO()
        shown.save(file, kind, optimize=True)
        if file.tell() <= _MAX_PNG_BYTES:
            break
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
