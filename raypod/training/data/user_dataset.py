"""Data sets of the user: `module:function`, called with the data folder, returns map-style data sets.

What people bring in place of a map-style data set, and how each is used: a line of an error message.
"""

from __future__ import annotations

from typing import Any, ContextManager, Optional

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from raypod.errors import ConfigError
from raypod.plan import user_code
from raypod.plan.config import Config
from raypod.plan.plan import DatasetSize
from raypod.training.data.arrays import ArrayDataset, ImageShape, Splits, fingerprint_of, fingerprint_of_values


def size(config: Config) -> DatasetSize:
    """Return the lengths of the splits."""
    with _reported(config):
        splits = load(config)
        return DatasetSize(len(splits.train), len(splits.test))


def shape(config: Config) -> ImageShape:
    """Return the shape of the first training image, and the number of classes."""
    with _reported(config):
        splits = load(config)
        samples: Any = splits.train
        image = np.shape(samples[0][0])
    if len(image) != 3:
        raise ConfigError(f"{config.data.dataset}: images must be [channels, height, width], not {list(image)}")
    return ImageShape(image[0], image[1], splits.classes)


def load(config: Config) -> Splits:
    """Call the function, which returns (train, test) or (train, test, classes).

    The fingerprint covers the name, the sizes, and the content if the splits are `ArrayDataset`s; of other data sets it
    covers the `fingerprint` attribute of the training split, if there is one.

    Raises:
        ConfigError: the function does not exist, or what it returns cannot be used.
    """
    name = config.data.dataset
    found = user_code.call(name, "data.dataset", config.data.data_dir)
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise ConfigError(f"{name} must return (train, test) or (train, test, number of classes)")
    train, test = found[:2]
    for split, data in (("train", train), ("test", test)):
        other_kind = way_to_use(data)
        if other_kind is not None:
            raise ConfigError(f"{name}: the {split} split is {other_kind}")
    classes = found[2] if len(found) == 3 else config.data.classes
    if not isinstance(classes, (int, np.integer)) or classes < 1:
        raise ConfigError(f"{name} returned {classes!r} as the number of classes; it must be a positive integer")
    for split, data in (("train", train), ("test", test)):
        if isinstance(data, ArrayDataset):
            _check_arrays(f"{name}: the {split} split", data, int(classes))
    arrays = [data for data in (train, test) if isinstance(data, ArrayDataset)]
    content = fingerprint_of(*arrays) if arrays else getattr(train, "fingerprint", "")
    fingerprint = fingerprint_of_values(name, len(train), len(test), classes, content)
    names = getattr(train, "classes", ())  # of torchvision's data sets
    is_usable = isinstance(names, (list, tuple)) and len(names) == classes
    return Splits(train, test, int(classes), fingerprint, names=tuple(map(str, names if is_usable else ())))


def _check_arrays(name: str, data: ArrayDataset, classes: int) -> None:
    """Raise ConfigError for arrays that would be cast to other images or labels."""
    images, labels = np.asarray(data.images), np.asarray(data.labels)
    if images.ndim != 4 or labels.shape != images.shape[:1]:
        raise ConfigError(
            f"{name} has images {list(images.shape)} and labels {list(labels.shape)}; an ArrayDataset has images "
            "[samples, channels, height, width] and labels [samples]"
        )
    if labels.dtype.kind not in "iu":
        raise ConfigError(f"{name} has labels of type {labels.dtype}; they must be integers")
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise ConfigError(
            f"{name} has label {labels[wrong[0]]} in sample {wrong[0]}, but labels of {classes} classes are 0 to "
            f"{classes - 1}; return (train, test, number of classes)"
        )
    if images.dtype.kind in "iu" and images.dtype != np.uint8:
        outside = np.flatnonzero(((images < 0) | (images > 255)).any(axis=(1, 2, 3)))
        if len(outside):
            raise ConfigError(f"{name} has {images.dtype} images, and sample {outside[0]} is not within 0..255")
    elif images.dtype != np.uint8:
        raise ConfigError(
            f"{name} has {images.dtype} images; those of an ArrayDataset are uint8: convert them, or return another "
            "data set with __len__ and __getitem__"
        )


def _reported(config: Config) -> ContextManager[None]:
    """Return the context of a plan, in which an exception of the function is an error in one line.

    An instance raises the exception itself: it can be one of that host, which the error of an instance names.
    """
    remark = "; its data_dir was None, as --data-dir is not given" if config.data.data_dir is None else ""
    return user_code.reported(config.data.dataset, remark)


def way_to_use(split: Any) -> Optional[str]:
    """Return how a split of another kind becomes one that can be used; None for a map-style data set."""
    if isinstance(split, DataLoader):
        return "a DataLoader, and raypod combines the batches itself: return its data set, `loader.dataset`"
    if is_of_hf(split, "IterableDatasetDict") or is_of_hf(split, "IterableDataset"):
        return (
            "a streamed Hugging Face data set, which has no order to seed: load it without `streaming=True`, and "
            "return `raypod.from_hf(dataset)`"
        )
    if isinstance(split, IterableDataset):
        return (
            "an IterableDataset, whose samples have no numbers, so neither shuffling nor a resume is exact: return "
            "`list(dataset)`, or a data set with __len__ and __getitem__; if it does not fit into memory, save it with "
            "save_to_disk of Hugging Face's datasets, whose files are memory-mapped, for `raypod pack FOLDER OUT`"
        )
    if type(split).__module__.startswith("ray.data"):
        return "of Ray Data: return `raypod.from_ray_data(dataset)`"
    if is_of_hf(split, "DatasetDict"):
        return 'a DatasetDict: return one of its data sets, as in `raypod.from_hf(data["train"])`'
    if is_of_hf(split, "Dataset") and getattr(split, "format", {"type": "torch"}).get("type") is None:
        return "a Hugging Face data set whose samples are lists: return `raypod.from_hf(dataset)`"
    if type(split).__module__.partition(".")[0] == "pandas" and type(split).__name__ == "DataFrame":
        return (
            "a DataFrame of pandas: return arrays of its columns, as in "
            '`raypod.Arrays(x=frame[["a", "b"]].to_numpy(), y=frame["c"].to_numpy())`'
        )
    if not (hasattr(split, "__len__") and hasattr(split, "__getitem__")):
        return "not a map-style data set (no __len__ or __getitem__)"
    return None


def is_of_hf(split: Any, name: str) -> bool:
    """Return whether a split is of a class of Hugging Face's package datasets, which may not be installed."""
    return type(split).__module__.startswith("datasets.") and type(split).__name__ == name
