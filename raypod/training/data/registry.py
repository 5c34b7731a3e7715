"""Image data sets by name: their sizes and shapes for planning, and the loaded splits.

No module here imports torch before a data set of the user or a folder of images is loaded: planning works without it.
A data set's module, and with it NumPy, is imported when it is used: a plan of the default run needs neither.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any, Dict, NamedTuple, Optional

from raypod.errors import ConfigError, DataMissing
from raypod.plan.config import DOWNLOADED, Config
from raypod.plan.plan import DatasetSize
from raypod.system.command_line import nearest

if TYPE_CHECKING:
    from raypod.training.data.arrays import ImageShape, Splits


class _Entry(NamedTuple):
    """A data set: a module of this folder, or an object in it, with the functions `size`, `shape` and `load`.

    Each gets the config. They return what `dataset_size`, `image_shape` and `load` return; `load` with the default
    augmentation of the data set. A constant size has no function.

    Attributes:
        size: the numbers of samples if they are constant.
        published: the numbers of samples, for a plan without the files.
    """

    module: str
    name: str = ""
    size: Optional[DatasetSize] = None
    published: Optional[DatasetSize] = None


_CIFAR_SIZE = DatasetSize(50000, 10000, is_published=True)
_BY_NAME: Dict[str, _Entry] = {
    "digits": _Entry("digits", size=DatasetSize(1437, 360)),
    "synthetic": _Entry("synthetic"),
    "cifar10": _Entry("cifar", "CIFAR10", published=_CIFAR_SIZE),
    "cifar100": _Entry("cifar", "CIFAR100", published=_CIFAR_SIZE),
    "imagefolder": _Entry("image_folder"),
    "shards": _Entry("packed_samples"),
    "imagenet": _Entry("image_folder", published=DatasetSize(1281167, 50000, is_published=True)),
}


def dataset_size(config: Config) -> DatasetSize:
    """Return the numbers of samples, without loading the images. ConfigError as `load`."""
    entry = _entry(config)
    return entry.size if entry.size is not None else _source(entry).size(config)


def dataset_size_or_published(config: Config) -> DatasetSize:
    """Return `dataset_size`, or the published numbers if the files are missing: for a plan that is only printed.

    Raises:
        ConfigError: as `load`, except for missing files of published data sets.
    """
    try:
        return dataset_size(config)
    except DataMissing:
        published = _entry(config).published
        if published is None:
            raise
        return published


def image_shape(config: Config) -> ImageShape:
    """Return the shape of the images as the network sees them, and the number of classes. ConfigError as `load`."""
    found: ImageShape = _source(_entry(config)).shape(config)
    return found if config.data.image_size is None else dataclasses.replace(found, side=config.data.image_size)


def load(config: Config) -> Splits:
    """Load the data set of a config.

    Raises:
        ConfigError: the name is unknown, files are missing or damaged, or the user's data set cannot be used.
    """
    from raypod.training.data.arrays import ArrayDataset, Augmentation

    splits: Splits = _source(_entry(config)).load(config)
    data, default, augmentation = config.data, splits.augmentation, Augmentation()
    if data.augment:
        augmentation = Augmentation(
            padding=default.padding if data.crop_padding is None else data.crop_padding,
            flip=default.flip if data.flip is None else data.flip,
        )
    if isinstance(splits.train, ArrayDataset) and augmentation.padding >= min(splits.train.images.shape[2:]):
        height, width = splits.train.images.shape[2:]
        raise ConfigError(
            f"--crop-padding {augmentation.padding} is too large for images of {height}x{width} pixels: "
            f"use less than {min(height, width)}"
        )
    return dataclasses.replace(splits, augmentation=augmentation)


def download(config: Config) -> None:
    """Download the files to this host if `data.download` is set and they are missing. ConfigError if that fails."""
    if config.data.dataset in DOWNLOADED:
        _source(_entry(config)).download(config)


def _source(entry: _Entry) -> Any:
    """Return the module, which is imported, or the object of an entry."""
    module = importlib.import_module(f"raypod.training.data.{entry.module}")
    return getattr(module, entry.name) if entry.name else module


def _entry(config: Config) -> _Entry:
    name = config.data.dataset
    if name in _BY_NAME:
        return _BY_NAME[name]
    if ":" in name:
        return _Entry("user_dataset")
    similar = "".join(f"; did you mean {each}?" for each in nearest(name, _BY_NAME))
    raise ConfigError(
        f"unknown data set {name!r}{similar}; known: {', '.join(_BY_NAME)}, or module:function for your own data set"
    )
