"""Measure the loading throughput with an empty loop: `python scripts/benchmark_dataset.py [--data-dir FOLDER]`.

The transforms of Graphcore's tutorials on CIFAR-10 (random flip, resize to 64x64, uint8), on one core:

* torchvision's transforms, sample by sample, in torch's DataLoader with 0 workers;
* raypod, the same tensors, a whole call at a time;
* raypod with --eight-bit-io: the host sends 32x32 images, and the device enlarges them.

First the tensors of both are compared, pixel by pixel, with the same flips. Rounds alternate; rates are medians over
the rounds, ratios are medians of the ratios of each round. Without --data-dir the data is generated (make_cifar.py).

Then the share of the calls' time that they wait for data: with a simulated device that sleeps as long as the tutorials'
pod computes (30,000 images/s), still on one core; and in a training on the emulated SDK.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, Iterator, List, Tuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import make_cifar  # noqa: E402 - needs the path above
import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from torch.utils.data import DataLoader, Dataset, Subset  # noqa: E402

from raypod.plan.cluster import LOCAL  # noqa: E402
from raypod.plan.plan import make_plan  # noqa: E402
from raypod.plan.resolve import from_values  # noqa: E402
from raypod.system import torchvision_import  # noqa: E402
from raypod.training import data as datasets  # noqa: E402
from raypod.training.data import (  # noqa: E402
    ArrayDataset,
    Augmentation,
    transforms,
)
from raypod.training.data.feed import Feed  # noqa: E402
from raypod.training.data.images import ImageSource  # noqa: E402
from raypod.training.data.loading import timed  # noqa: E402
from raypod.training.data.order import augmentation_integers, epoch_order  # noqa: E402
from raypod.training.tasks.registry import facts_of  # noqa: E402

torchvision_import.install()
from torchvision import transforms as theirs  # noqa: E402

SIZE, SEED = 64, 42
FLIP = Augmentation(flip=True)


class BySample(Dataset):  # type: ignore[type-arg]
    """torchvision.datasets.CIFAR10 without its check of the files' checksums."""

    def __init__(self, data: ArrayDataset) -> None:
        self.images = np.ascontiguousarray(data.images.transpose(0, 2, 3, 1))
        self.labels = data.labels.tolist()
        self.transform = theirs.Compose([theirs.RandomHorizontalFlip(), theirs.Resize(SIZE), theirs.PILToTensor()])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def largest_difference(data: ArrayDataset, samples: np.ndarray) -> int:
    """Return the largest pixel difference (0..255) between torchvision's tensors and ours with the same flips."""
    ours, _ = transforms.gather(data, samples, FLIP, (SEED, 0), SIZE)
    flips = augmentation_integers(SEED, 0, samples, 2, 3)[:, 2]
    largest = 0
    for mine, sample, flipped in zip(ours, samples, flips):
        image = Image.fromarray(data.images[sample].transpose(1, 2, 0))
        image = theirs.functional.hflip(image) if flipped else image
        expected = theirs.functional.pil_to_tensor(theirs.functional.resize(image, [SIZE])).numpy()
        largest = max(largest, int(np.abs(mine.astype(int) - expected).max()))
    return largest


def images_per_s(batches: Iterator[Any]) -> float:
    """Iterate over the batches and return the throughput."""
    began, images = time.perf_counter(), 0
    for data, _ in batches:
        images += len(data)
    return images / (time.perf_counter() - began)


def ours(data: ArrayDataset, calls: List[np.ndarray], size: Any) -> Iterator[Any]:
    """Yield (images, labels) of each call, made as `Feed` does."""
    for samples in calls:
        images, labels = transforms.gather(data, samples, FLIP, (SEED, 0), size)
        yield torch.from_numpy(images), torch.from_numpy(labels)


def loading(data: ArrayDataset, rounds: int, per_call: int, calls: int) -> List[Tuple[str, float, float]]:
    """Return (method, images/s, ratio to torchvision) of each method."""
    order = epoch_order(SEED, 0, len(data))[: per_call * calls]
    batches = np.split(order, len(order) // per_call)
    loader: Any = DataLoader(Subset(BySample(data), order.tolist()), batch_size=per_call)
    methods: Dict[str, Callable[[], Iterator[Any]]] = {
        "torchvision, sample by sample": lambda: iter(loader),
        "raypod, the same tensors": lambda: ours(data, batches, SIZE),
        "raypod, 32x32 for the device": lambda: ours(data, batches, None),
    }
    for load in methods.values():
        next(load())  # warm up: imports, page cache
    found: Dict[str, List[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, load in methods.items():
            found[name].append(images_per_s(load()))
    base = found["torchvision, sample by sample"]
    return [(name, median(got), median(a / b for a, b in zip(got, base))) for name, got in found.items()]


def feed_of(args: argparse.Namespace, data_dir: str) -> Iterator[Any]:
    """Yield the calls of an instance with one replica, as the trainer loads them."""
    names = ("batch_size", "gradient_accumulation", "device_iterations")
    data = {"dataset": "cifar10", "data_dir": data_dir, "eight_bit_io": True, "image_size": SIZE}
    sizes = {name: getattr(args, name) for name in names}
    config = from_values({"data": data, "training": sizes, "pod": {"replicas": 1, "num_instances": 1}})
    plan = make_plan(config, LOCAL, facts_of(config), "none")
    feed = Feed(plan, plan.placement.instances[0], ImageSource(config, datasets.load(config)))
    try:
        for segment in plan.segments():
            yield from feed.calls(segment)
    finally:
        feed.close()


def waiting_share(batches: Iterator[Any], device_s: float, calls: int) -> float:
    """Return the share of the time that `calls` calls wait for data, after a first one; the device only sleeps."""
    waits = []
    for number, (_, wait_s) in enumerate(timed(batches)):
        waits.append(wait_s)
        time.sleep(device_s)
        if number == calls:
            break
    return sum(waits[1:]) / (sum(waits[1:]) + calls * device_s)


def training_wait(data_dir: str, flags: List[str]) -> Tuple[float, float]:
    """Run a short training in a subprocess; return (images/s, share of the calls' time that they wait for data)."""
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "raypod.train", "--fleet", "inline", "--device", "emulated"]
        line += ["--dataset", "cifar10", "--data-dir", data_dir, "--run-dir", f"{folder}/run", *flags]
        subprocess.run(line, check=True, timeout=500, cwd=str(ROOT), stdout=subprocess.DEVNULL)
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
    return summary["samples_per_s"], summary["data_wait_share"]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Measure the loading throughput with an empty loop.")
    parser.add_argument("--data-dir", help="folder of cifar-10-batches-py; default: generated data")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--gradient-accumulation", type=int, default=8)
    parser.add_argument("--device-iterations", type=int, default=4)
    parser.add_argument("--calls", type=int, default=4, help="calls per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device-images-per-s", type=float, default=30000, help="throughput of the simulated device")
    parser.add_argument("--no-training", action="store_true", help="skip the training")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        if args.data_dir is None:
            make_cifar.write(Path(made), train=10000, test=1000, classes=10)
        data_dir = args.data_dir or made
        data = datasets.load(from_values({"data": {"dataset": "cifar10", "data_dir": data_dir}})).train
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
        torch.set_num_threads(1)
        difference = largest_difference(data, np.arange(0, len(data), max(1, len(data) // 500)))
        print(f"largest pixel difference to torchvision: {difference} of 255")
        assert difference <= 1, "the tensors differ"
        per_call = args.batch_size * args.gradient_accumulation * args.device_iterations
        calls = max(1, min(args.calls, len(data) // per_call))
        print(f"one core, {calls} calls of {per_call} images per round, {args.rounds} rounds\n")
        print("| method | images/s | ratio to torchvision | goal |\n|---|---|---|---|")
        goals = {"raypod, the same tensors": ">= 10"}
        for name, rate, ratio in loading(data, args.rounds, per_call, calls):
            print(f"| {name} | {rate:,.0f} | {ratio:.1f} | {goals.get(name, '')} |")
        device_s = per_call / args.device_images_per_s
        print(f"\na simulated device of {args.device_images_per_s:,.0f} images/s: {device_s:.3f} s per call\n")
        print("| method | waiting for data | goal |\n|---|---|---|")
        loader: Any = DataLoader(BySample(data), batch_size=per_call, shuffle=True, drop_last=True)
        share = waiting_share(iter(loader), device_s, min(3, len(data) // per_call - 1))
        print(f"| torchvision, sample by sample | {100 * share:.1f} % | |")
        share = waiting_share(feed_of(args, data_dir), device_s, 50)
        print(f"| raypod, --eight-bit-io | {100 * share:.2f} % | < 2 % |")
        if not args.no_training:
            os.sched_setaffinity(0, cores)
            flags = ["--model", "resnet8", "--batch-size", "64", "--gradient-accumulation", "4", "--replicas", "2"]
            rate, share = training_wait(data_dir, [*flags, "--eight-bit-io", "--resize", str(SIZE), "--updates", "8"])
            print(
                f"\ntraining resnet8, emulated: {rate:,.0f} images/s, waiting for data {100 * share:.2f} % (goal < 2 %)"
            )


if __name__ == "__main__":
    main()
