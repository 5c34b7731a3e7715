"""Data sets by name: their sizes and shapes for planning, and the loaded splits.

No module here imports torch before a data set of the user or a folder of images is loaded: planning works without it.
"""

from __future__ import annotations

import dataclasses
from typing import Dict, Tuple

from typing_extensions import Protocol

from raypod.datasets import cifar, digits, image_folder, synthetic, user_dataset
from raypod.datasets.arrays import ArrayDataset, Augmentation, ImageShape, Splits
from raypod.errors import ConfigError, DataMissing
from raypod.plan.config import Config
from raypod.plan.plan import DatasetSize


class DatasetSource(Protocol):
    """The functions of a data set: a module or an object has them."""

    def size(self, config: Config) -> DatasetSize:
        """Return the numbers of samples."""

    def shape(self, config: Config) -> ImageShape:
        """Return the shape of the images and the number of classes."""

    def load(self, config: Config) -> Splits:
        """Return the splits, with the default augmentation of the data set."""


_BY_NAME: Dict[str, DatasetSource] = {
    "digits": digits,
    "synthetic": synthetic,
    "cifar10": cifar.CIFAR10,
    "cifar100": cifar.CIFAR100,
    "imagefolder": image_folder,
    "imagenet": image_folder,
}

_PUBLISHED: Dict[str, Tuple[int, int]] = {
    "cifar10": (50000, 10000),
    "cifar100": (50000, 10000),
    "imagenet": (1281167, 50000),
}


def dataset_size(config: Config) -> DatasetSize:
    """Return the numbers of samples, without loading the images.

    Raises:
        ConfigError: as `load`.
    """
    return _source(config).size(config)


def dataset_size_or_published(config: Config) -> DatasetSize:
    """Return `dataset_size`, or the published numbers if the files are missing: for a plan that is only printed.

    Raises:
        ConfigError: as `load`, except for missing files of published data sets.
    """
    published = _PUBLISHED.get(config.data.dataset)
    try:
        return dataset_size(config)
    except DataMissing:
        if published is None:
            raise
        return DatasetSize(*published, is_published=True)


def image_shape(config: Config) -> ImageShape:
    """Return the shape of the images as the network sees them, and the number of classes.

    Raises:
        ConfigError: as `load`.
    """
    found = _source(config).shape(config)
    return found if config.data.image_size is None else dataclasses.replace(found, side=config.data.image_size)


def load(config: Config) -> Splits:
    """Load the data set of a config.

    Raises:
        ConfigError: the name is unknown, files are missing or damaged, or the user's data set cannot be used.
    """
    splits = _source(config).load(config)
    augmentation = _augmentation(config, splits.augmentation)
    if isinstance(splits.train, ArrayDataset) and augmentation.padding >= min(splits.train.images.shape[2:]):
        height, width = splits.train.images.shape[2:]
        raise ConfigError(
            f"--crop-padding {augmentation.padding} is too large for images of {height}x{width} pixels: "
            f"use less than {min(height, width)}"
        )
    return dataclasses.replace(splits, augmentation=augmentation)


def download(config: Config) -> None:
    """Download the files to this host if `data.download` is set and they are missing.

    Raises:
        ConfigError: the data set has no download, or the download fails.
    """
    source = _source(config)
    if isinstance(source, cifar.Cifar):
        source.download(config)
    elif config.data.download:
        raise ConfigError(f"--download: the data set {config.data.dataset} cannot be downloaded; remove the flag")


def _source(config: Config) -> DatasetSource:
    name = config.data.dataset
    if name in _BY_NAME:
        return _BY_NAME[name]
    if ":" in name:
        return user_dataset
    raise ConfigError(
        f"unknown data set {name!r}; known: {', '.join(_BY_NAME)}, or module:function for your own data set"
    )


def _augmentation(config: Config, default: Augmentation) -> Augmentation:
    """Return the configured augmentation, with the data set's default for settings that are not set."""
    data = config.data
    if not data.augment:
        return Augmentation()
    return Augmentation(
        padding=default.padding if data.crop_padding is None else data.crop_padding,
        flip=default.flip if data.flip is None else data.flip,
    )
