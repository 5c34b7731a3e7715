"""`--max-image-pixels`: a large image is refused before it is decoded."""

from __future__ import annotations

import io
import re
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from raypod.errors import ConfigError
from raypod.training import data as datasets
from raypod.training.data.pixels import open_image
from raypod.training.tasks.image_classification import ImageReader
from tests.support import image_folders


@pytest.mark.parametrize("decoder", ["pillow", "simplejpeg"])
def test_training_and_prediction_refuse_an_image_with_more_pixels(decoder: str, tmp_path: Path) -> None:
    pytest.importorskip(decoder.replace("pillow", "PIL"))
    folder = image_folders.write(tmp_path)
    file, pixels = folder / "train" / "cat" / "b.jpg", 500 * 400
    image_folders.photograph(1, 500, 400).save(file, "JPEG")
    accepted, refused = (
        datasets.load(image_folders.config(folder, image_size=24, jpeg_decoder=decoder, max_image_pixels=limit))
        for limit in (pixels, pixels - 1)
    )
    assert accepted.train[1][0].shape == ImageReader("imagefolder", accepted).read(file).shape
    message = f"{re.escape(str(file))}: it has .* pixels, more than --max-image-pixels {pixels - 1}"
    with pytest.raises(OSError, match=f"{message}.* accept more with --max-image-pixels, or .* with --leave-out 1"):
        refused.train[1]
    with pytest.raises(ConfigError, match=message):
        ImageReader("imagefolder", refused).read(file)


def test_the_limit_replaces_that_of_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    size = 30_000
    png = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", struct.pack(">IIBBBBB", size, size, 1, 0, 0, 0, 0)) + _chunk(b"IDAT")
    with pytest.raises(OSError, match="--max-image-pixels is 1000"):
        open_image(io.BytesIO(png), 1000)
    with open_image(io.BytesIO(png), size * size) as image:
        assert image.size == (size, size)


def _chunk(kind: bytes, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
