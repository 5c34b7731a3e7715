"""Data sets of one's own: `module:function`, called with the data folder, gives any torch map-style data sets."""

from __future__ import annotations

from typing import Any

import numpy as np

from raypod.datasets.arrays import ArrayDataset, ImageShape, Splits, fingerprint_of, fingerprint_of_words
from raypod.errors import ConfigError
from raypod.plan import user_code
from raypod.plan.config import Config
from raypod.plan.plan import DatasetSize


def size(config: Config) -> DatasetSize:
    """The lengths of what the function gives."""
    splits = load(config)
    return DatasetSize(len(splits.train), len(splits.test))


def shape(config: Config) -> ImageShape:
    """That of the first training image."""
    splits = load(config)
    samples: Any = splits.train
    channels, height, _ = np.shape(samples[0][0])
    return ImageShape(channels, height, splits.classes)


def load(config: Config) -> Splits:
    """(train, test) or (train, test, classes). An `ArrayDataset` of raypod's is gathered as the built-in ones are.

    Which data it is, only its owner knows: a `fingerprint` attribute of the training split, or else its name and sizes.

    Raises:
        ConfigError: the function cannot be found, or what it returns cannot be used.
    """
    name = config.data.dataset
    found = user_code.call(name, "data.dataset", config.data.data_dir)
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise ConfigError(f"{name} must return (train, test) or (train, test, number of classes)")
    train, test = found[:2]
    for split, data in (("train", train), ("test", test)):
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise ConfigError(f"{name}: its {split} split is no map-style data set (no length or index)")
    classes = found[2] if len(found) == 3 else config.data.classes
    if not isinstance(classes, (int, np.integer)) or classes < 1:
        raise ConfigError(f"{name}: the number of classes that it returns is {classes!r}, not a whole number above 0")
    arrays = [data for data in (train, test) if isinstance(data, ArrayDataset)]
    own = fingerprint_of(*arrays) if arrays else getattr(train, "fingerprint", "")
    return Splits(train, test, int(classes), fingerprint_of_words(name, len(train), len(test), classes, own))
