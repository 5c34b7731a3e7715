"""Generate JPEG files with ImageNet's sizes: `python scripts/make_imagenet.py FOLDER [--train 20000]`.

It replaces the real data on machines without it. More than half of the images have 500x375 pixels or similar, the
others log-normally distributed sides; the files have about 120 kB on average, those of ImageNet 110 kB. The content is
1/f noise, whose statistics resemble those of photographs: the time to decode a JPEG depends on the number of its bytes
and pixels. One image in 50 is grayscale, one in 200 CMYK, and one in 50 has an EXIF orientation. The same seed and the
same version of Pillow write the same bytes.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
from pathlib import Path
from typing import Tuple

import numpy as np
from PIL import Image

COMMON_SIZES = ((500, 375), (500, 375), (500, 333), (375, 500), (333, 500))  # width, height
COMMON_SHARE, MEDIAN_SIDE, SIDE_SIGMA = 0.6, 430, 0.45  # of the other images: the longer side is log-normal
MIN_SIDE, MAX_SIDE = 60, 3000
QUALITIES, QUALITY_SHARES = (75, 85, 92, 96), (0.1, 0.25, 0.35, 0.3)
BANK = (3072, 3072)  # height and width of the noise from which the images are cut
ORIENTATION = 0x0112  # the EXIF tag


@functools.lru_cache(maxsize=None)
def noise() -> np.ndarray:
    """Return colored noise with an amplitude of about 1/f: uint8 [height, width, 3]."""
    random = np.random.default_rng(0)
    rows, columns = np.fft.fftfreq(BANK[0])[:, None], np.fft.rfftfreq(BANK[1])[None]
    filters = 1 / np.maximum(np.hypot(rows, columns), 1 / 512) ** 1.1
    planes = [np.fft.irfft2(np.fft.rfft2(random.standard_normal(BANK)) * filters, BANK) for _ in range(3)]
    shared = planes[0] / planes[0].std()
    colored = [shared + 0.35 * plane / plane.std() for plane in planes]
    return np.stack([128 + 50 * plane for plane in colored], axis=2).clip(0, 255).astype(np.uint8)


def size_of(random: np.random.Generator) -> Tuple[int, int]:
    """Return the width and the height of an image."""
    if random.random() < COMMON_SHARE:
        return COMMON_SIZES[random.integers(len(COMMON_SIZES))]
    longer = MEDIAN_SIDE * np.exp(SIDE_SIGMA * random.standard_normal())
    sides = np.clip([longer, longer * random.uniform(0.6, 1)], MIN_SIDE, MAX_SIDE).astype(int)
    width, height = sides if random.random() < 0.7 else sides[::-1]
    return int(width), int(height)


def write_image(path: Path, seed: Tuple[int, ...]) -> None:
    """Write the image with a seed."""
    random = np.random.default_rng(seed)
    width, height = size_of(random)
    top, left = random.integers(0, BANK[0] - height + 1), random.integers(0, BANK[1] - width + 1)
    image = Image.fromarray(noise()[top : top + height, left : left + width])
    image = image.convert("RGB", (*[v for row in np.eye(3) * random.uniform(0.5, 1.2, 3)[:, None] for v in (*row, 0)],))
    kind, options = random.random(), {}
    if kind < 0.02:
        image = image.convert("L")
    elif kind < 0.025:
        image = image.convert("CMYK")
    elif kind < 0.045:
        exif = Image.Exif()
        exif[ORIENTATION] = int(random.integers(2, 9))
        options["exif"] = exif
    quality = int(random.choice(QUALITIES, p=QUALITY_SHARES))
    image.save(str(path), quality=quality, subsampling=0 if random.random() < 0.15 else 2, **options)


def _write(task: Tuple[Path, Tuple[int, ...]]) -> int:
    write_image(*task)
    return task[0].stat().st_size


def write(folder: Path, train: int, test: int, classes: int, seed: int = 0, workers: int = 1) -> int:
    """Write `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`; return the number of bytes."""
    tasks = []
    for part, (split, count) in enumerate((("train", train), ("val", test))):
        for number in range(classes):
            (folder / split / f"n{number:08d}").mkdir(parents=True)
        names = [f"n{index % classes:08d}/{split}_{index:08d}.JPEG" for index in range(count)]
        tasks += [(folder / split / name, (seed, part, index)) for index, name in enumerate(names)]
    if workers == 1:
        return sum(map(_write, tasks))
    with multiprocessing.Pool(workers) as pool:
        return sum(pool.imap_unordered(_write, tasks, chunksize=16))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Generate JPEG files with ImageNet's sizes.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=20000)
    parser.add_argument("--test", type=int, default=1000)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes")
    args = parser.parse_args()
    written = write(args.folder, args.train, args.test, args.classes, args.seed, args.workers)
    count = args.train + args.test
    print(f"{args.folder}: {count} images, {written / 1e9:.2f} GB, {written / count / 1e3:.0f} kB on average")


if __name__ == "__main__":
    main()
