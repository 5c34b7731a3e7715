"""Bounding boxes of the objects in training images: the CSV file of Graphcore's CNN application, and crops by them."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Dict, Set, Tuple

import numpy as np

from raypod.errors import ConfigError, as_utf8
from raypod.system.files import looked_in

Box = Tuple[float, float, float, float]  # left, top, right, bottom, in shares of the width and the height of an image
WHOLE: Box = (0.0, 0.0, 1.0, 1.0)
_LEAST_SHARE = 0.1  # of a crop that is in the box


def boxes_of(file: str, images: np.ndarray) -> np.ndarray:
    """Return the boxes of training images, float32 [images, 4]. An image without one has the whole image as its box.

    Args:
        file: `data.bounding_boxes`, with lines NAME,x1,y1,x2,y2. Of several lines with a name, the last one counts.
        images: bytes [images], as "train/CLASS/NAME". CLASS/NAME in the file is for names that several images have.

    Raises:
        ConfigError: the file cannot be read, a line is malformed, or the file has no box, or no clear one, of an image.
    """
    boxes = _read(file)
    found = np.tile(np.array(WHOLE, dtype=np.float32), (len(images), 1))
    taken: Set[str] = set()
    for index, image in enumerate(images.tolist()):
        path = os.fsdecode(image).partition("/")[2]
        name = path if path in boxes else path.rpartition("/")[2]
        if name in boxes:
            if name in taken:
                raise ConfigError(
                    f"--bounding-boxes {file}: several training images are named {as_utf8(name)}, as {as_utf8(path)}: "
                    "write CLASS/NAME in the file"
                )
            taken.add(name)
            found[index] = boxes[name]
    if not taken:
        raise ConfigError(f"--bounding-boxes {file} has a box of none of the {len(images)} training images")
    return found


def is_covered(crop: Tuple[int, int, int, int], height: int, width: int, box: Box) -> bool:
    """Whether a crop (top, left, rows, columns) of an image of a size has enough of the box."""
    top, left, rows, columns = crop
    across = min(left + columns, box[2] * width) - max(left, box[0] * width)
    down = min(top + rows, box[3] * height) - max(top, box[1] * height)
    return max(across, 0.0) * max(down, 0.0) >= _LEAST_SHARE * rows * columns


def _read(file: str) -> Dict[str, Box]:
    path, boxes = Path(file).expanduser(), {}
    try:
        with path.open(encoding="utf-8", errors="surrogateescape", newline="") as lines:
            reader = csv.reader(lines)
            try:
                for row in reader:
                    left, top, right, bottom = map(float, row[1:])
                    if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
                        raise ConfigError(
                            f"--bounding-boxes {file}: line {reader.line_num}: the box {','.join(row[1:])} is empty or "
                            "outside of the image: x1 < x2 and y1 < y2 are 0 to 1"
                        )
                    boxes[row[0]] = (left, top, right, bottom)
            except (csv.Error, ValueError):
                raise ConfigError(f"--bounding-boxes {file}: line {reader.line_num} is no NAME,x1,y1,x2,y2") from None
    except OSError as error:
        raise ConfigError(f"--bounding-boxes {file}: {error.strerror}{looked_in(path)}") from None
    return boxes
