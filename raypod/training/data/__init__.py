"""Data sets and the input pipeline: from a data set's name to the combined batch of one call."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from raypod.training.data.registry import dataset_size, dataset_size_or_published, download, image_shape, load

if TYPE_CHECKING:
    from raypod.training.data.arrays import ArrayDataset as ArrayDataset
    from raypod.training.data.arrays import Augmentation as Augmentation
    from raypod.training.data.arrays import ImageShape as ImageShape
    from raypod.training.data.arrays import Splits as Splits

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
        return getattr(importlib.import_module("raypod.training.data.arrays"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
