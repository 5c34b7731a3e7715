"""`raypod.log_image` and `raypod.log_text`: what callbacks give to the trackers of the run that calls them."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Callable, Iterator, Optional

from raypod.errors import ConfigError
from raypod.runs.media import Kind

if TYPE_CHECKING:
    import numpy as np

Log = Callable[[Kind, str, bytes], None]
_MAX_SIDE = 4096  # pixels
_MAX_TEXT_BYTES = 1 << 20
_CHANNELS = (1, 3, 4)
_log: ContextVar[Optional[Log]] = ContextVar("raypod_log_media", default=None)


def log_image(name: str, image: Any) -> None:
    """Give a picture to every tracker of the run, with the number of finished updates as step; for callbacks.

    It is also a PNG file in the folder `media` of the run folder.

    Args:
        name: of the series of pictures, as in "samples/first".
        image: a tensor or an array [height, width], [channels, height, width] or [height, width, channels] with 1, 3 or
            4 channels, of integers from 0 to 255, of bool, or of floating-point numbers from 0 to 1; an image of
            Pillow, or a figure of Matplotlib.

    Raises:
        ConfigError: it is not called by a callback of a run, or the image cannot be used.
    """
    _logger("log_image", name)("image", name, _png(image))


def log_text(name: str, text: str) -> None:
    """Give a text to every tracker of the run, with the number of finished updates as step; for callbacks.

    It is also a text file in the folder `media` of the run folder.

    Args:
        name: of the series of texts.
        text: at most 1 MiB in UTF-8. TensorBoard shows Markdown.

    Raises:
        ConfigError: it is not called by a callback of a run, or the text cannot be used.
    """
    log = _logger("log_text", name)
    if not isinstance(text, str):
        raise ConfigError(f"log_text: a text is a str, not a {type(text).__name__}")
    content = text.encode("utf-8", "backslashreplace")
    if len(content) > _MAX_TEXT_BYTES:
        raise ConfigError(f"log_text: the text has {len(content)} bytes; at most {_MAX_TEXT_BYTES} are kept")
    log("text", name, content)


@contextlib.contextmanager
def logging_to(log: Log) -> Iterator[None]:
    """Let `log_image` and `log_text` call `log` inside the context, in this thread."""
    token = _log.set(log)
    try:
        yield
    finally:
        _log.reset(token)


def _logger(function: str, name: Any) -> Log:
    log = _log.get()
    if log is None:
        raise ConfigError(
            f"raypod.{function} is for the callbacks of raypod.fit and raypod.stream: no run calls it here"
        )
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"{function}: the name is a text that is not empty, not {name!r:.80}")
    return log


def _png(image: Any) -> bytes:
    file = io.BytesIO()
    if hasattr(image, "savefig"):
        image.savefig(file, format="png")
        return file.getvalue()
    from PIL import Image  # importing raypod imports no Pillow

    if not isinstance(image, Image.Image):
        pixels = _pixels(image)
        image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    if max(image.size) > _MAX_SIDE or not min(image.size):
        raise ConfigError(
            f"log_image: an image has 1 to {_MAX_SIDE} pixels per side, not {image.width} x {image.height}"
        )
    if image.mode not in ("L", "RGB", "RGBA"):
        image = image.convert("RGBA" if "A" in image.getbands() or "transparency" in image.info else "RGB")
    image.save(file, "png")
    return file.getvalue()


def _pixels(image: Any) -> np.ndarray:
    """Return uint8 [height, width, channels] of a tensor or an array. ConfigError if it is no image."""
    import numpy as np  # as above

    if hasattr(image, "detach"):
        image = image.detach().cpu()
        image = image.float() if image.is_floating_point() else image
    if isinstance(image, (str, bytes, os.PathLike)) or not hasattr(image, "__array__"):
        raise ConfigError(
            f"log_image: a {type(image).__name__} is no image; give a tensor, an array, an image of Pillow or a figure "
            "of Matplotlib"
        )
    array = np.asarray(image)
    if array.ndim == 2:
        array = array[..., None]
    elif array.ndim == 3 and array.shape[0] in _CHANNELS and (array.shape[2] not in _CHANNELS or hasattr(image, "dim")):
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] not in _CHANNELS:
        shape = list(np.asarray(image).shape)
        raise ConfigError(
            f"log_image: an image is [height, width], [channels, height, width] or [height, width, channels] with 1, 3 "
            f"or 4 channels, not {shape}; torchvision.utils.make_grid makes one image of a batch"
        )
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * 255
    elif np.issubdtype(array.dtype, np.floating):
        if not ((array >= 0) & (array <= 1)).all():
            warnings.warn("log_image: floating-point pixels are clipped to 0..1, and NaN is 0", RuntimeWarning, 4)
        array = (255 * np.clip(np.nan_to_num(array, nan=0.0), 0, 1)).round().astype(np.uint8)
    elif not np.issubdtype(array.dtype, np.integer) or (array.size and not 0 <= array.min() <= array.max() <= 255):
        what = f"{array.dtype} from {array.min()} to {array.max()}" if array.dtype.kind in "iu" else str(array.dtype)
        raise ConfigError(f"log_image: pixels are integers from 0 to 255, or numbers from 0 to 1, not {what}")
    return np.ascontiguousarray(array, dtype=np.uint8)
