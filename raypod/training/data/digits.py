"""Optical recognition of handwritten digits (Alpaydin and Kaynak 1998): 1,797 images of 8x8 in 17 grey levels.

The file `digits.csv.gz` beside this module is that of scikit-learn; `digits.LICENSE` has its source and its licence.
"""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path
from typing import Tuple

import numpy as np

from raypod.errors import DataMissing
from raypod.plan.config import Config
from raypod.training.data.arrays import ArrayDataset, Augmentation, ImageShape, Splits, fingerprint_of

TRAIN_SAMPLES, TEST_SAMPLES = 1437, 360  # of 1,797: every fifth image is a test image
_FILE = Path(__file__).with_name("digits.csv.gz")


def shape(config: Config) -> ImageShape:
    """Return the shape of the images, which is constant."""
    return ImageShape(1, 8, 10)


def load(config: Config) -> Splits:
    """Split the images: every fifth is a test image. The grey levels 0 to 16 become 0 to 255.

    Raises:
        DataMissing: as from `load_digits`.
    """
    levels, labels = load_digits()
    images = np.rint(levels * (255 / 16)).astype(np.uint8)[:, None]
    is_test = np.arange(len(labels)) % 5 == 0
    train = ArrayDataset(images[~is_test], labels[~is_test])
    test = ArrayDataset(images[is_test], labels[is_test])
    return Splits(train, test, 10, fingerprint_of(train, test), (0.305,), (0.376,), Augmentation(padding=1))


def load_digits() -> Tuple[np.ndarray, np.ndarray]:
    """Return all images, float64 [1797, 8, 8] in grey levels from 0 to 16, and their labels, int64 [1797].

    Raises:
        DataMissing: the file is missing or damaged, which is a part of raypod.
    """
    try:
        with gzip.open(str(_FILE), "rt") as lines:
            table = np.array([[float(cell) for cell in row] for row in csv.reader(io.StringIO(lines.read()))])
        images, labels = table[:, :64].reshape(TRAIN_SAMPLES + TEST_SAMPLES, 8, 8), table[:, 64]
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise DataMissing(f"{_FILE}, which is a part of raypod, is missing or damaged: install raypod again") from error
    return images, labels.astype(np.int64)
