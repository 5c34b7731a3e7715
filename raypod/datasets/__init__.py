"""Data sets and the input pipeline: from a data set by name to the combined batch of one call."""

from raypod.datasets.arrays import ArrayDataset, Augmentation, ImageShape, Splits
from raypod.datasets.registry import (
    dataset_size,
    dataset_size_for_a_look,
    download,
    image_shape,
    load,
)

__all__ = [
    "ArrayDataset",
    "Augmentation",
    "ImageShape",
    "Splits",
    "dataset_size",
    "dataset_size_for_a_look",
    "download",
    "image_shape",
    "load",
]
