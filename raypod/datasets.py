"""Data sets: handwritten digits, a synthetic one of any size, and any map-style data set of your own.

The built-in ones lie in memory as arrays (`ArrayDataset`), are gathered and augmented a whole batch at a time, and
need numpy only, so that planning a run on them imports no torch.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import importlib
import importlib.util
import io
import sys
from pathlib import Path
from typing import Any, Optional, Tuple, Union

import numpy as np

from raypod.config import Config
from raypod.errors import ConfigError
from raypod.plan import DatasetSize
from raypod.sampling import augmentation_integers, mix

DIGITS_TRAIN, DIGITS_TEST = 1437, 360  # of 1,797: every fifth image is a test image


@dataclasses.dataclass(frozen=True)
class ArrayDataset:
    """Images in memory.

    Args:
        images: uint8 [samples, channels, height, width].
        labels: int64 [samples].
        shift: largest shift in pixels, in both directions, of an augmented image.
    """

    images: np.ndarray
    labels: np.ndarray
    shift: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, samples: np.ndarray, augmentation: Optional[Tuple[int, int]]) -> Tuple[np.ndarray, np.ndarray]:
        """Images and labels of `samples`; `augmentation` is (seed, epoch), or None for the images as they are."""
        images = self.images[samples]
        if augmentation is not None and self.shift:
            seed, epoch = augmentation
            images = _shift(images, augmentation_integers(seed, epoch, samples, 2 * self.shift + 1, 2), self.shift)
        return images, self.labels[samples]


@dataclasses.dataclass(frozen=True)
class Splits:
    """A data set as the trainer uses it. `mean` and `std` are of images scaled to [0, 1]."""

    train: Union[ArrayDataset, Any]
    test: Union[ArrayDataset, Any]
    classes: int
    mean: float = 0.0
    std: float = 1.0


def dataset_size(config: Config) -> DatasetSize:
    """Sizes for the plan; the built-in data sets are not loaded for it."""
    name = config.data.dataset
    if name == "digits":
        return DatasetSize(DIGITS_TRAIN, DIGITS_TEST)
    if name == "synthetic":
        return DatasetSize(config.data.samples, _synthetic_test_samples(config))
    splits = load(config)
    return DatasetSize(len(splits.train), len(splits.test))


def load(config: Config) -> Splits:
    """The data set of a config.

    Raises:
        ConfigError: the name is not known, or the module or function of your own cannot be used.
    """
    name = config.data.dataset
    if name == "digits":
        return _digits(config)
    if name == "synthetic":
        return _synthetic(config)
    if ":" in name:
        return _own(config)
    raise ConfigError(f"unknown data set {name!r}; known: digits, synthetic, or module:function for one of your own")


def _digits(config: Config) -> Splits:
    """Optical recognition of handwritten digits (Alpaydin and Kaynak 1998): 1,797 images of 8x8 in 17 grey levels.

    Read from the file that scikit-learn ships; importing scikit-learn for it would add a second to every start.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ConfigError("the digits data set lies in the package scikit-learn: pip install scikit-learn")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(str(file), "rt") as lines:
        table = np.array([[float(cell) for cell in row] for row in csv.reader(io.StringIO(lines.read()))])
    images = np.rint(table[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = table[:, 64].astype(np.int64)
    is_test = np.arange(len(labels)) % 5 == 0
    return Splits(
        train=ArrayDataset(images[~is_test], labels[~is_test], shift=1 if config.data.augment else 0),
        test=ArrayDataset(images[is_test], labels[is_test]),
        classes=10,
        mean=0.305,
        std=0.376,
    )


def _synthetic_test_samples(config: Config) -> int:
    return max(1, config.data.samples // 8)


def _synthetic(config: Config) -> Splits:
    """One random pattern per class under noise: learnable, of any size, a function of the seed."""
    shape = tuple(int(size) for size in config.data.image.split("x"))
    classes, seed = config.data.classes, config.training.seed
    patterns = (mix(3, seed, np.arange(classes * int(np.prod(shape)))) >> np.uint64(57)).astype(np.uint8)
    patterns = patterns.reshape(classes, *shape)  # 0..127; the noise adds 0..127

    def split(stream: int, samples: int) -> ArrayDataset:
        labels = (mix(stream, seed, np.arange(samples)) % np.uint64(classes)).astype(np.int64)
        noise = np.random.default_rng([stream, seed]).integers(0, 128, size=(samples, *shape), dtype=np.uint8)
        return ArrayDataset(patterns[labels] + noise, labels)

    test = split(5, _synthetic_test_samples(config))
    return Splits(split(4, config.data.samples), test, classes, mean=0.5, std=0.2)


def _own(config: Config) -> Splits:
    """`module:function`, called with data_dir, gives (train, test) or (train, test, classes)."""
    function = import_attribute(config.data.dataset, "data.dataset")
    found = function(config.data.data_dir)
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise ConfigError(f"{config.data.dataset} must return (train, test) or (train, test, number of classes)")
    train, test = found[:2]
    for split, data in (("train", train), ("test", test)):
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise ConfigError(f"{config.data.dataset}: its {split} split is no map-style data set (no length or index)")
    return Splits(train, test, found[2] if len(found) == 3 else config.data.classes)


def import_attribute(name: str, key: str) -> Any:
    """The object that `module:attribute` names; modules of the current folder are found."""
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{key} = {name!r}: {error}") from None
    except AttributeError:
        raise ConfigError(f"{key} = {name!r}: the module {module_name} has no {attribute!r}") from None


def _shift(images: np.ndarray, offsets: np.ndarray, largest: int) -> np.ndarray:
    """Shift each image by its own (row, column) offset in 0..2*largest, filling with zeros; all at once."""
    count, channels, height, width = images.shape
    padded = np.zeros((count, channels, height + 2 * largest, width + 2 * largest), dtype=images.dtype)
    padded[:, :, largest : largest + height, largest : largest + width] = images
    rows = offsets[:, 0, None] + np.arange(height)
    columns = offsets[:, 1, None] + np.arange(width)
    each = np.arange(count)[:, None, None]
    # Advanced indices around the channel slice put the channels last: [count, height, width, channels].
    return np.ascontiguousarray(padded[each, :, rows[:, :, None], columns[:, None, :]].transpose(0, 3, 1, 2))
