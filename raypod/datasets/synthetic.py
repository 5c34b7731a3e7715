"""Images of any size and number that can be learned: one random pattern per class under noise."""

from __future__ import annotations

import numpy as np

from raypod.datasets.arrays import ArrayDataset, ImageShape, Splits, fingerprint_of
from raypod.datasets.order import mix
from raypod.plan.config import Config
from raypod.plan.plan import DatasetSize

_PATTERNS, _TRAIN, _TEST = 3, 4, 5  # streams of random numbers


def size(config: Config) -> DatasetSize:
    """As configured; one test image for eight training images."""
    return DatasetSize(config.data.samples, max(1, config.data.samples // 8))


def shape(config: Config) -> ImageShape:
    """As configured."""
    channels, height, _ = (int(size) for size in config.data.image.split("x"))
    return ImageShape(channels, height, config.data.classes)


def load(config: Config) -> Splits:
    """A function of the seed."""
    shape = tuple(int(side) for side in config.data.image.split("x"))
    classes, seed = config.data.classes, config.training.seed
    patterns = (mix(_PATTERNS, seed, np.arange(classes * int(np.prod(shape)))) >> np.uint64(57)).astype(np.uint8)
    patterns = patterns.reshape(classes, *shape)  # 0..127; the noise adds 0..127

    def split(stream: int, samples: int) -> ArrayDataset:
        labels = (mix(stream, seed, np.arange(samples)) % np.uint64(classes)).astype(np.int64)
        noise = np.random.default_rng([stream, seed]).integers(0, 128, size=(samples, *shape), dtype=np.uint8)
        return ArrayDataset(patterns[labels] + noise, labels)

    sizes = size(config)
    train, test = split(_TRAIN, sizes.train_samples), split(_TEST, sizes.test_samples)
    return Splits(train, test, classes, fingerprint_of(train, test), mean=(0.5,), std=(0.2,))
