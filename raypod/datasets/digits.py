"""Optical recognition of handwritten digits (Alpaydin and Kaynak 1998): 1,797 images of 8x8 in 17 grey levels."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
from pathlib import Path

import numpy as np

from raypod.datasets.arrays import ArrayDataset, Augmentation, ImageShape, Splits, fingerprint_of
from raypod.errors import ConfigError
from raypod.plan.config import Config
from raypod.plan.plan import DatasetSize

TRAIN_SAMPLES, TEST_SAMPLES = 1437, 360  # of 1,797: every fifth image is a test image


def size(config: Config) -> DatasetSize:
    """Return the numbers of samples, which are constant."""
    return DatasetSize(TRAIN_SAMPLES, TEST_SAMPLES)


def shape(config: Config) -> ImageShape:
    """Return the shape of the images, which is constant."""
    return ImageShape(1, 8, 10)


def load(config: Config) -> Splits:
    """Read the file in scikit-learn's package, without importing scikit-learn: that takes a second.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ConfigError(
            "the digits data set is part of scikit-learn, which is not installed: pip install scikit-learn"
        )
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(str(file), "rt") as lines:
        table = np.array([[float(cell) for cell in row] for row in csv.reader(io.StringIO(lines.read()))])
    images = np.rint(table[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = table[:, 64].astype(np.int64)
    is_test = np.arange(len(labels)) % 5 == 0
    train = ArrayDataset(images[~is_test], labels[~is_test])
    test = ArrayDataset(images[is_test], labels[is_test])
    return Splits(train, test, 10, fingerprint_of(train, test), (0.305,), (0.376,), Augmentation(padding=1))
