"""Generate a learnable data set in the format of CIFAR-10 or CIFAR-100: `python scripts/make_cifar.py FOLDER`.

It replaces the real data on machines without it. Each class has a few colored patterns; an image is one of them,
shifted, with reduced contrast and with noise. More patterns are harder to learn. The same seed writes the same bytes.
"""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import List, Tuple

import numpy as np

SIDE, COARSE = 32, 8
PATTERNS = 3  # of a class


def images_of(labels: np.ndarray, patterns: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return uint8 [samples, 3072], laid out [channel, row, column] as in the published files."""
    kinds = random.integers(0, patterns.shape[1], len(labels))
    rows, columns = random.integers(-3, 4, (2, len(labels), 1)) + np.arange(SIDE)
    each = np.arange(len(labels))[:, None, None]
    chosen = patterns[labels, kinds].transpose(0, 2, 3, 1)
    shifted = chosen[each, rows[:, :, None] % SIDE, columns[:, None, :] % SIDE]
    strength = random.uniform(0.3, 0.7, (len(labels), 1, 1, 1))
    noisy = 128 + strength * (shifted - 128) + random.normal(0, 20, shifted.shape)
    return noisy.clip(0, 255).astype(np.uint8).transpose(0, 3, 1, 2).reshape(len(labels), 3 * SIDE * SIDE)


def patterns_of(classes: int, random: np.random.Generator, patterns: int = PATTERNS) -> np.ndarray:
    """Return float32 [classes, patterns, 3, SIDE, SIDE] in 0..255: the patterns of each class."""
    coarse = random.integers(0, 256, (classes, patterns, 3, COARSE, COARSE)).astype(np.float32)
    return coarse.repeat(SIDE // COARSE, axis=3).repeat(SIDE // COARSE, axis=4)


def write(folder: Path, train: int, test: int, classes: int, seed: int = 0, patterns: int = PATTERNS) -> Path:
    """Write `cifar-10-batches-py` (10 classes) or `cifar-100-python` (100) to `folder`; return its path."""
    random = np.random.default_rng(seed)
    drawn = patterns_of(classes, random, patterns)
    if classes == 10:
        name, key, meta, names = "cifar-10-batches-py", "labels", "batches.meta", "label_names"
        sizes = [len(part) for part in np.array_split(np.arange(train), 5)]
        files: List[Tuple[str, int]] = [(f"data_batch_{number}", size) for number, size in enumerate(sizes, start=1)]
        files.append(("test_batch", test))
    else:
        name, key, meta, names = "cifar-100-python", "fine_labels", "meta", "fine_label_names"
        files = [("train", train), ("test", test)]
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    for file, samples in files:
        labels = random.integers(0, classes, samples)
        content = {"data": images_of(labels, drawn, random), key: labels.tolist()}
        (target / file).write_bytes(pickle.dumps(content, protocol=4))
    (target / meta).write_bytes(pickle.dumps({names: [f"class {index}" for index in range(classes)]}, protocol=4))
    return target


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Generate data in the format of CIFAR.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=50000)
    parser.add_argument("--test", type=int, default=10000)
    parser.add_argument("--classes", type=int, default=10, choices=(10, 100))
    parser.add_argument("--patterns", type=int, default=PATTERNS, help="per class")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(write(args.folder, args.train, args.test, args.classes, args.seed, args.patterns))


if __name__ == "__main__":
    main()
