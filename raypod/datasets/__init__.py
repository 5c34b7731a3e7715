"""Data sets by name. Each module here gives the sizes that the plan needs and, later, the data itself.

Those that lie in memory as arrays (`ArrayDataset`) are gathered and augmented a whole batch at a time. Nothing here
imports torch until data of one's own asks for it, so that a plan can be made without it.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any, Dict

from raypod.config import Config
from raypod.datasets import digits, own, synthetic
from raypod.datasets.arrays import ArrayDataset, Augmentation, ImageShape, Splits
from raypod.errors import ConfigError
from raypod.plan import DatasetSize

__all__ = ["ArrayDataset", "Augmentation", "ImageShape", "Splits", "dataset_size", "fingerprint", "image_shape", "load"]

_BY_NAME: Dict[str, ModuleType] = {"digits": digits, "synthetic": synthetic}


def dataset_size(config: Config) -> DatasetSize:
    """Sizes for the plan; the images are not loaded for it.

    Raises:
        ConfigError: as `load`.
    """
    found: DatasetSize = _source(config).size(config)
    return found


def image_shape(config: Config) -> ImageShape:
    """What the network has to know of the images, as they arrive on the device.

    Raises:
        ConfigError: as `load`.
    """
    found: ImageShape = _source(config).shape(config)
    return found


def load(config: Config) -> Splits:
    """The data set of a config.

    Raises:
        ConfigError: the name is not known, files are missing or damaged, or what is your own cannot be used.
    """
    splits: Splits = _source(config).load(config)
    return dataclasses.replace(splits, augmentation=_augmentation(config, splits.augmentation))


def fingerprint(config: Config) -> str:
    """Which data a config names: equal for equal data, on every host (see `Splits`)."""
    return load(config).fingerprint


def _source(config: Config) -> Any:
    name = config.data.dataset
    if name in _BY_NAME:
        return _BY_NAME[name]
    if ":" in name:
        return own
    raise ConfigError(
        f"unknown data set {name!r}; known: {', '.join(_BY_NAME)}, or module:function for one of your own"
    )


def _augmentation(config: Config, usual: Augmentation) -> Augmentation:
    """What the config says, and where it says nothing what is usual for the data set."""
    data = config.data
    if not data.augment:
        return Augmentation()
    return Augmentation(
        padding=usual.padding if data.crop_padding is None else data.crop_padding,
        flip=usual.flip if data.flip is None else data.flip,
    )
