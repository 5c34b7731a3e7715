"""The types that describe a loaded data set, and the fingerprints that identify its content."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import mmap
import weakref
from pathlib import Path
from typing import Any, Tuple, Union

import numpy as np

_mapped: weakref.WeakKeyDictionary[mmap.mmap, Tuple[Path, int]] = weakref.WeakKeyDictionary()  # file, bytes
_HASHED_IMAGES = 1024  # per split, evenly spaced: hashing takes milliseconds for any size


@dataclasses.dataclass(frozen=True)
class ArrayDataset:
    """A map-style data set of images in memory, or in a memory-mapped file.

    Args:
        images: uint8 [samples, channels, height, width].
        labels: int64 [samples].
    """

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Tuple[np.ndarray, int]:
        """Return (image, label)."""
        return self.images[index], int(self.labels[index])


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """The random augmentation of training images, applied before they are resized.

    Args:
        padding: zero padding in pixels on each side, before a random crop to the original size.
        flip: flip each image horizontally with probability 0.5.
    """

    padding: int = 0
    flip: bool = False


@dataclasses.dataclass(frozen=True)
class Splits:
    """A loaded data set.

    Args:
        train, test: an `ArrayDataset`, or any map-style data set of (image, label).
        classes: number of classes.
        fingerprint: hash that identifies the data, the same on every host.
        mean, std: of images scaled to [0, 1]; one value, or one per channel.
        augmentation: of the training images, if they are arrays.
        names: of the classes; empty if they have none.
    """

    train: Union[ArrayDataset, Any]
    test: Union[ArrayDataset, Any]
    classes: int
    fingerprint: str
    mean: Tuple[float, ...] = (0.0,)
    std: Tuple[float, ...] = (1.0,)
    augmentation: Augmentation = Augmentation()
    names: Tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ImageShape:
    """The input and output sizes of a network: images [channels, side, side], and the number of classes."""

    channels: int
    side: int
    classes: int


def fingerprint_of(*splits: ArrayDataset) -> str:
    """Return the SHA-256 of the shapes, the labels and up to 1,024 images of each split."""
    digest = hashlib.sha256()
    for split in splits:
        digest.update(f"{split.images.shape} {split.images.dtype}\n".encode())
        digest.update(np.asarray(split.labels, dtype=np.int64).tobytes())
        step = max(1, -(-len(split) // _HASHED_IMAGES))
        digest.update(split.images[::step].tobytes())
    return digest.hexdigest()


def fingerprint_of_bytes(*arrays: np.ndarray) -> str:
    """Return the SHA-256 of the full content of the arrays."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.shape} {array.dtype}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def fingerprint_of_values(*values: object) -> str:
    """Return the SHA-256 of the string forms of the values."""
    return hashlib.sha256("\n".join(map(str, values)).encode()).hexdigest()


def load_mapped(file: Path) -> np.ndarray:
    """Return the array of a .npy file, memory-mapped read-only. OSError, or ValueError if it is damaged."""
    mapped: Any = np.load(str(file), mmap_mode="r", allow_pickle=False)
    _mapped[mapped._mmap] = (file, mapped._mmap.size())
    array: np.ndarray = mapped.view(np.ndarray)  # indexing an ndarray is several times faster than indexing a memmap
    return array


def check_mapped() -> None:
    """Raise OSError if a file that `load_mapped` has mapped was truncated: a read of its end kills by SIGBUS."""
    for mapped, (file, size) in list(_mapped.items()):
        now = mapped.size()
        if now < size:
            raise OSError(errno.EIO, f"it was truncated from {size} to {now} bytes while the run uses it", str(file))
