"""Data sets and the input pipeline: from a data set's name to the combined batch of one call."""

from raypod.datasets.arrays import ArrayDataset, Augmentation, ImageShape, Splits
from raypod.datasets.registry import dataset_size, dataset_size_or_published, download, image_shape, load

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
