"""Measure the loading of an image folder: `python scripts/bench_images.py [FOLDER]`.

Training samples of 224x224, random resized crops with flips, on one core and without worker processes:

* torchvision's ImageFolder and transforms in torch's DataLoader, the baseline;
* raypod with Pillow, with simplejpeg (if it is installed), and from the shards of `raypod pack`.

All load the same images in the same random order, other ones in each round, from a warm page cache. Rounds are
interleaved; rates are medians over the rounds, ratios are medians of the ratios of each round, with the smallest and
the largest. Rates are per second of CPU time, so that other processes on the core count less.

Before that, the samples of both decoders are compared pixel by pixel. After it, the files alone are read in random
order, from the folder and from the shards, with a cold page cache (as root also without cached folder entries) and with
a warm one. Without FOLDER, images are generated (make_imagenet.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, Iterator, List, Tuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import make_imagenet  # noqa: E402 - needs the path above
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from raypod.plan.resolve import from_values  # noqa: E402
from raypod.system import torchvision_import  # noqa: E402
from raypod.training import data as datasets  # noqa: E402
from raypod.training.data import packing  # noqa: E402
from raypod.training.data.loaders import SampleLoader  # noqa: E402
from raypod.training.data.loading import SeededSamples  # noqa: E402
from raypod.training.data.order import epoch_order  # noqa: E402

torchvision_import.install()
from torchvision import transforms  # noqa: E402
from torchvision.datasets import ImageFolder  # noqa: E402

SEED, BATCH, SIDE = 42, 64, 224
SHARD_BYTES = 10**9
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
BASELINE = "torchvision, DataLoader"
Loader = Callable[[np.ndarray], Iterator[Any]]


def splits_of(folder: Path, decoder: str) -> Any:
    """Return the splits of an image folder or a packed one."""
    data = {"dataset": "imagefolder", "data_dir": str(folder), "jpeg_decoder": decoder}
    return datasets.load(from_values({"data": data}))


def raypod_loader(data: Any) -> Loader:
    """Return what loads samples as an instance does."""
    loader = SampleLoader(data, SEED, 0, finish=lambda batch: batch)

    def load(samples: np.ndarray) -> Iterator[Any]:
        return loader.load((0, samples[first : first + BATCH]) for first in range(0, len(samples), BATCH))

    return load


def torchvision_loader(folder: Path) -> Loader:
    """Return what loads samples of torchvision's ImageFolder; its order of files is that of raypod."""
    crop = [transforms.RandomResizedCrop(SIDE), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    data = ImageFolder(str(folder / "train"), transforms.Compose(crop))

    def load(samples: np.ndarray) -> Iterator[Any]:
        return iter(DataLoader(data, batch_size=BATCH, sampler=samples.tolist()))

    return load


def loaders(folder: Path, packed: Path, decoders: List[str]) -> Dict[str, Loader]:
    """Return what is measured, by name."""
    found = {BASELINE: torchvision_loader(folder)}
    for decoder in decoders:
        found[f"raypod, {decoder}"] = raypod_loader(splits_of(folder, decoder).train)
    found[f"raypod, {decoders[-1]}, shards"] = raypod_loader(splits_of(packed, decoders[-1]).train)
    return found


def loading(methods: Dict[str, Loader], raw: List[Any], order: np.ndarray, rounds: int) -> None:
    """Print the images/s of each method, and their ratios to torchvision's; `raw` are the files of each."""
    rates: Dict[str, List[float]] = {name: [] for name in methods}
    for load in methods.values():
        list(load(order[:BATCH]))  # imports
    for samples in np.array_split(order, rounds):
        for files in raw:
            read(files, samples)  # the page cache is warm for all
        for name, load in methods.items():
            began = time.process_time()
            batches = sum(1 for _ in load(samples))
            rates[name].append(len(samples) / (time.process_time() - began))
            assert batches == -(-len(samples) // BATCH)
    print("\n| one core | images per CPU second | ratio to torchvision | smallest to largest |\n|---|---|---|---|")
    for name, found in rates.items():
        print(f"| {name} | {median(found):.0f} | {ratios(found, rates[BASELINE])} |", flush=True)


def ratios(ours: List[float], base: List[float]) -> str:
    """Return the median of the ratios of each round, and the smallest and largest, as cells of a table."""
    found = sorted(mine / theirs for mine, theirs in zip(ours, base))
    return f"{median(found):.2f} | {found[0]:.2f} to {found[-1]:.2f}"


def read(files: Any, samples: np.ndarray) -> float:
    """Read files, and return the MB/s."""
    began = time.perf_counter()
    count = sum(len(files.read(int(index))) for index in samples)
    return count / 1e6 / (time.perf_counter() - began)


def differences(folder: Path, samples: np.ndarray) -> None:
    """Print how much the samples of simplejpeg differ from those of Pillow."""
    pillow, fast = (splits_of(folder, name) for name in ("pillow", "simplejpeg"))
    print("\n| samples | mean difference of 255 | largest mean of a sample | largest of a pixel |\n|---|---|---|---|")
    for split in ("train", "test"):
        chosen = samples[samples < len(getattr(fast, split))]
        both = [SeededSamples(getattr(splits, split), SEED) for splits in (pillow, fast)]
        found = []
        for index in chosen:
            one, other = (each[0, int(index)][1][0].to(torch.int16) for each in both)
            difference = (one - other).abs()
            found.append((float(difference.float().mean()), int(difference.max())))
        kinds = {
            "by at most 1": [each for each in found if each[1] <= 1],
            "by more": [each for each in found if each[1] > 1],
        }
        for kind, rows in {"all": found, **kinds}.items():
            if rows:
                means, most = zip(*rows)
                print(
                    f"| {split}, {kind}: {len(rows)} | {np.mean(means):.3f} | {max(means):.2f} | {max(most)} |",
                    flush=True,
                )


def drop_caches(paths: List[Path]) -> str:
    """Remove files from the page cache; return how."""
    os.sync()
    try:
        DROP_CACHES.write_text("3")
    except OSError:
        for path in paths:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return "cold (files)"
    return "cold (files and folder entries)"


def reading(folder: Path, packed: Path, raw: List[Any], order: np.ndarray, rounds: int) -> None:
    """Print the MB/s of reading the files of the samples in random order, from the folder and from the shards."""
    places = {"files": (raw[0], list((folder / "train").rglob("*.*"))), "shards": (raw[1], list(packed.rglob("*.tar")))}
    rates: Dict[Tuple[str, str], List[float]] = {}
    for samples in np.array_split(order, rounds):
        for name, (files, paths) in places.items():
            state = drop_caches(paths)
            rates.setdefault((state, name), []).append(read(files, samples))
            rates.setdefault(("warm", name), []).append(read(files, samples))
    print("\n| page cache | place | MB/s | ratio to files | smallest to largest |\n|---|---|---|---|---|")
    for (state, name), found in sorted(rates.items()):
        print(f"| {state} | {name} | {median(found):.0f} | {ratios(found, rates[state, 'files'])} |", flush=True)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Measure the loading of an image folder.")
    parser.add_argument("folder", nargs="?", type=Path, help="image folder with val/; default: generated images")
    parser.add_argument("--packed", type=Path, help="folder that `raypod pack` has written; default: a temporary one")
    parser.add_argument("--images", type=int, default=20000, help="number of training images that are measured")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--compared", type=int, default=500, help="number of samples whose pixels are compared")
    parser.add_argument("--only", choices=("differences", "loading", "reading"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = args.folder or Path(made, "images")
        if args.folder is None:
            make_imagenet.write(folder, args.images, test=500, classes=100, workers=os.cpu_count() or 1)
        packed = args.packed or Path(made, "packed")
        if args.packed is None:
            packing.pack(folder, packed, SHARD_BYTES, lambda written, total: None)
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        torch.set_num_threads(1)
        decoders = ["pillow", *(["simplejpeg"] if importlib.util.find_spec("simplejpeg") else [])]
        splits = [splits_of(each, "pillow").train for each in (folder, packed)]
        order = epoch_order(SEED, 0, len(splits[0]))[: args.images]
        raw = [split.files for split in splits]
        print(f"{len(order)} images in {args.rounds} rounds, {' and '.join(decoders)}")
        if args.only in (None, "differences") and len(decoders) == 2:
            differences(folder, order[: args.compared])
        if args.only in (None, "loading"):
            loading(loaders(folder, packed, decoders), raw, order, args.rounds)
        if args.only in (None, "reading"):
            reading(folder, packed, raw, order, args.rounds)


if __name__ == "__main__":
    main()
