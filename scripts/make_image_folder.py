"""Generate a learnable data set in ImageNet's layout: `python scripts/make_image_folder.py FOLDER`.

It writes `train/CLASS/*.jpg` and `val/CLASS/*.jpg`. Images are those of make_cifar.py, enlarged to different sizes and
aspect ratios, as photographs have them. The same seed writes the same files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import make_cifar
import numpy as np
from PIL import Image

_SIDES = (80, 121)  # the smallest, and above the largest


def write(
    folder: Path, train: int, test: int, classes: int, seed: int = 0, patterns: int = make_cifar.PATTERNS
) -> Path:
    """Write `train` and `test` images of `classes` classes, which alternate, to `folder`; return it."""
    random = np.random.default_rng(seed)
    drawn = make_cifar.patterns_of(classes, random, patterns)
    for split, count in (("train", train), ("val", test)):
        labels = np.arange(count) % classes
        images = make_cifar.images_of(labels, drawn, random).reshape(count, 3, make_cifar.SIDE, make_cifar.SIDE)
        for label in range(classes):
            (folder / split / f"class{label:03d}").mkdir(parents=True, exist_ok=True)
        for index, (label, image) in enumerate(zip(labels, images)):
            width, height = (int(side) for side in random.integers(*_SIDES, 2))
            picture = Image.fromarray(image.transpose(1, 2, 0)).resize((width, height))
            picture.save(folder / split / f"class{label:03d}" / f"{index:06d}.jpg", quality=95)
    return folder


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Generate data in the layout of ImageNet.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=10000)
    parser.add_argument("--test", type=int, default=1000)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--patterns", type=int, default=make_cifar.PATTERNS, help="per class")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(write(args.folder, args.train, args.test, args.classes, args.seed, args.patterns))


if __name__ == "__main__":
    main()
