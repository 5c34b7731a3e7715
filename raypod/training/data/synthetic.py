"""Generated images of any size and number that a network can learn: one random pattern per class, plus noise."""

from __future__ import annotations

import numpy as np

from raypod.plan.config import Config
from raypod.plan.plan import DatasetSize
from raypod.training.data.arrays import ArrayDataset, ImageShape, Splits, fingerprint_of
from raypod.training.data.order import hash_integers

_PATTERNS, _TRAIN, _TEST = 3, 4, 5  # independent streams of random numbers


def size(config: Config) -> DatasetSize:
    """Return `data.samples` training samples and one test sample for every eight of them."""
    return DatasetSize(config.data.samples, max(1, config.data.samples // 8))


def shape(config: Config) -> ImageShape:
    """Return the channels and height of `data.image`, and `data.classes`."""
    channels, height, _ = (int(side) for side in config.data.image.split("x"))
    return ImageShape(channels, height, config.data.classes)


def load(config: Config) -> Splits:
    """Generate the images as a function of the seed."""
    image_shape = tuple(int(side) for side in config.data.image.split("x"))
    classes, seed = config.data.classes, config.training.seed
    pixels = np.arange(classes * int(np.prod(image_shape)))
    patterns = (hash_integers(_PATTERNS, seed, pixels) >> np.uint64(57)).astype(np.uint8)
    patterns = patterns.reshape(classes, *image_shape)  # 0..127; the noise adds 0..127

    def split(stream: int, samples: int) -> ArrayDataset:
        labels = (hash_integers(stream, seed, np.arange(samples)) % np.uint64(classes)).astype(np.int64)
        noise = np.random.default_rng([stream, seed]).integers(0, 128, size=(samples, *image_shape), dtype=np.uint8)
        return ArrayDataset(patterns[labels] + noise, labels)

    sizes = size(config)
    train, test = split(_TRAIN, sizes.train_samples), split(_TEST, sizes.test_samples)
    return Splits(train, test, classes, fingerprint_of(train, test), mean=(0.5,), std=(0.2,))
