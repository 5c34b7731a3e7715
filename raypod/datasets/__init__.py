"""Data sets and the input pipeline: from a data set's name to the combined batch of one call."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from raypod.datasets.registry import dataset_size, dataset_size_or_published, download, image_shape, load

if TYPE_CHECKING:
    from raypod.datasets.arrays import ArrayDataset as ArrayDataset
    from raypod.datasets.arrays import Augmentation as Augmentation
    from raypod.datasets.arrays import ImageShape as ImageShape
    from raypod.datasets.arrays import Splits as Splits

__all__ = [
    "ArrayDataset",
    "Augmentation",
    "ImageShape",
    "Splits",
    "dataset_size",
    "dataset_size_or_published",
    "download",
    "image_shape",
    "load",
]


def __getattr__(name: str) -> Any:
    """Import the types of the arrays, and NumPy, when they are used."""
    if name in __all__:
        return getattr(importlib.import_module("raypod.datasets.arrays"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
