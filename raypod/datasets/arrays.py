"""What a data set is to the trainer: two splits, what to do with their images, and a hash that tells it from others."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, Tuple, Union

import numpy as np

_HASHED_IMAGES = 1024  # of a split, evenly spaced: a fingerprint costs milliseconds, whatever the size


@dataclasses.dataclass(frozen=True)
class ArrayDataset:
    """Images in memory, or in a file that is mapped into it.

    Args:
        images: uint8 [samples, channels, height, width].
        labels: int64 [samples].
    """

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Tuple[np.ndarray, int]:
        """(image, label): it is a map-style data set, too."""
        return self.images[index], int(self.labels[index])


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """What happens to the training images of arrays, at random, before they are resized.

    Args:
        padding: pixels of zeros around an image, out of which a piece of its own size is cropped.
        flip: whether half of the images are mirrored, left to right.
    """

    padding: int = 0
    flip: bool = False


@dataclasses.dataclass(frozen=True)
class Splits:
    """A data set as the trainer uses it.

    Args:
        train, test: arrays, or any map-style data set that gives (image, label).
        fingerprint: hash of what identifies the data, the same on every host.
        mean, std: of images scaled to [0, 1]: one value, or one per channel.
    """

    train: Union[ArrayDataset, Any]
    test: Union[ArrayDataset, Any]
    classes: int
    fingerprint: str
    mean: Tuple[float, ...] = (0.0,)
    std: Tuple[float, ...] = (1.0,)
    augmentation: Augmentation = Augmentation()


@dataclasses.dataclass(frozen=True)
class ImageShape:
    """What a network has to know: images [channels, side, side], and the number of classes."""

    channels: int
    side: int
    classes: int


def fingerprint_of(*splits: ArrayDataset) -> str:
    """SHA-256 over shapes, labels and up to 1,024 images of each split."""
    digest = hashlib.sha256()
    for split in splits:
        digest.update(f"{split.images.shape} {split.images.dtype}\n".encode())
        digest.update(np.asarray(split.labels, dtype=np.int64).tobytes())
        step = max(1, -(-len(split) // _HASHED_IMAGES))
        digest.update(split.images[::step].tobytes())
    return digest.hexdigest()


def fingerprint_of_bytes(*arrays: np.ndarray) -> str:
    """SHA-256 over all of some arrays."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.shape} {array.dtype}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def fingerprint_of_words(*words: object) -> str:
    """SHA-256 over what identifies data that cannot be looked at cheaply."""
    return hashlib.sha256("\n".join(map(str, words)).encode()).hexdigest()
