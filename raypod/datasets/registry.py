"""Data sets by name. Each module here gives the sizes that the plan needs and, later, the data itself.

Those that lie in memory as arrays (`ArrayDataset`) are gathered and augmented a whole batch at a time. Nothing here
imports torch until data of one's own asks for it, so that a plan can be made without it.
"""

from __future__ import annotations

import dataclasses
from typing import Dict, Tuple

from typing_extensions import Protocol

from raypod.datasets import cifar, digits, image_folder, own, synthetic
from raypod.datasets.arrays import ArrayDataset, Augmentation, ImageShape, Splits
from raypod.errors import ConfigError, DataMissing
from raypod.plan.config import Config
from raypod.plan.plan import DatasetSize


class Source(Protocol):
    """What a data set is before it is loaded: a module, or an object like one."""

    def size(self, config: Config) -> DatasetSize:
        """The numbers of samples."""

    def shape(self, config: Config) -> ImageShape:
        """The images and classes."""

    def load(self, config: Config) -> Splits:
        """The splits, with the augmentation that is usual for them."""


_BY_NAME: Dict[str, Source] = {
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
    """Sizes for the plan; the images are not loaded for it.

    Raises:
        ConfigError: as `load`.
    """
    return _source(config).size(config)


def dataset_size_for_a_look(config: Config) -> DatasetSize:
    """As `dataset_size`, and where the files are not here the sizes that were published: for a plan that is not run.

    Raises:
        ConfigError: as `load`, but for published data that is missing.
    """
    published = _PUBLISHED.get(config.data.dataset)
    try:
        return dataset_size(config)
    except DataMissing:
        if published is None:
            raise
        return DatasetSize(*published, is_published=True)


def image_shape(config: Config) -> ImageShape:
    """What the network has to know of the images, as it sees them.

    Raises:
        ConfigError: as `load`.
    """
    found = _source(config).shape(config)
    return found if config.data.image_size is None else dataclasses.replace(found, side=config.data.image_size)


def load(config: Config) -> Splits:
    """The data set of a config.

    Raises:
        ConfigError: the name is not known, files are missing or damaged, or what is your own cannot be used.
    """
    splits = _source(config).load(config)
    augmentation = _augmentation(config, splits.augmentation)
    if isinstance(splits.train, ArrayDataset) and augmentation.padding >= min(splits.train.images.shape[2:]):
        height, width = splits.train.images.shape[2:]
        raise ConfigError(
            f"--crop-padding {augmentation.padding} would shift images of {height}x{width} pixels out of sight: "
            f"use less than {min(height, width)}"
        )
    return dataclasses.replace(splits, augmentation=augmentation)


def download(config: Config) -> None:
    """Fetch the files on this host, where `--download` asks for it and they are missing.

    Raises:
        ConfigError: there is nothing to download, or it cannot be fetched.
    """
    source = _source(config)
    if isinstance(source, cifar.Cifar):
        source.download(config)
    elif config.data.download:
        raise ConfigError(f"--download: raypod knows no place to get {config.data.dataset} from; leave it out")


def _source(config: Config) -> Source:
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
