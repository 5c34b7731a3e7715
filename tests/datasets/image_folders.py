"""Small image folders for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, Tuple

import numpy as np
from PIL import Image

ORIENTATION = 0x0112  # the EXIF tag


def photograph(seed: int, width: int, height: int) -> Image.Image:
    """An image with large structures, in which every crop looks different."""
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def write(folder: Path) -> Path:
    """Two classes with 6 training images each, of all kinds that ImageNet has, and 1 test image."""
    kinds: Dict[str, Tuple[str, Dict[str, object]]] = {
        "a.JPEG": ("RGB", {}),
        "b.jpg": ("RGB", {"subsampling": 0}),
        "c.jpg": ("L", {}),
        "d.jpg": ("CMYK", {}),
        "e.png": ("RGBA", {}),
        "f.jpeg": ("RGB", {"progressive": True}),
    }
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    for number, name in enumerate(("cat", "dog")):
        for split, files in (("train", list(kinds)), ("val", ["a.JPEG"])):
            (folder / split / name).mkdir(parents=True)
            for position, file in enumerate(files):
                mode, options = kinds[file]
                image = photograph(100 * number + position + 50 * (split == "val"), 130 + 7 * position, 100)
                if file == "b.jpg":
                    options = {**options, "exif": exif}
                options = {} if file.endswith("png") else {"quality": 92, **options}
                image.convert(mode).save(str(folder / split / name / file), **options)
    return folder
