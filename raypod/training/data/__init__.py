"""Data sets and the input pipeline: from a data set's name to the combined batch of one call."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypod.training.data.arrays import ArrayDataset, Augmentation, ImageShape, Splits
    from raypod.training.data.registry import dataset_size, dataset_size_or_published, download, image_shape, load

_OF_ARRAYS = ("ArrayDataset", "Augmentation", "ImageShape", "Splits")

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
    """Import the module of a name when it is used: NumPy with the types of the arrays, the configuration with the rest.

    The process that downloads shards needs neither.
    """
    if name in __all__:
        module = "arrays" if name in _OF_ARRAYS else "registry"
        return getattr(importlib.import_module(f"raypod.training.data.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
