"""Measure the comparison that Graphcore's tutorial leaves blank: `python scripts/compare.py [--data-dir FOLDER]`.

Its four steps on the same data: 1. no data parallelism; 2. eight replicas in one instance; 3. the same with loader
workers; 4. eight replicas in four instances. Each with three methods:

* simulated device, tutorial's data path: torchvision transforms images one by one (flip, 64x64, uint8). The device
  takes a fixed time per call and no CPU, as an IPU does, so that the times show the host side;
* simulated device, raypod's data path: the same images, a whole call at a time; the device enlarges them;
* emulated SDK, raypod's data path: a real training on this CPU. Losses and accuracies are those of the training; times
  are those of the emulation, not of an IPU. The global batch of steps 2 to 4 is eight times that of step 1: their
  learning rate is scaled with it, and they train for --most-epochs. The column `epochs` is the first epoch after which
  the test accuracy is that of step 1's last.

Without --data-dir the data is generated in CIFAR-10's format (make_cifar.py). --plot needs matplotlib (`raypod[dev]`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any, Dict, List, NamedTuple, Tuple

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 1800
SECONDS = "COMPARE_SECONDS_PER_MICRO_BATCH"
REPLICAS = 8

STEPS: Tuple[Tuple[str, List[str]], ...] = (
    ("1 replica", ["--replicas", "1", "--fleet", "inline"]),
    (f"{REPLICAS} replicas, 1 instance", ["--replicas", str(REPLICAS), "--fleet", "inline"]),
    ("the same, loader workers", ["--replicas", str(REPLICAS), "--fleet", "inline", "--num-workers", "4"]),
    (f"{REPLICAS} replicas, 4 instances", ["--replicas", str(REPLICAS), "--num-instances", "4"]),
)
SIMULATED = ["--model", "compare:simulated_device", "--optimizer", "sgd", "--learning-rate", "0.001"]
TRAINED = "emulated SDK, raypod's data path"
METHODS: Dict[str, List[str]] = {
    "simulated device, tutorial's data path": [*SIMULATED, "--dataset", "compare:by_sample"],
    "simulated device, raypod's data path": [*SIMULATED, "--dataset", "cifar10"],
    TRAINED: ["--dataset", "cifar10"],
}


class Row(NamedTuple):
    """The result of one step with one method."""

    step: str
    epoch_s: float
    images_per_s: float
    data_wait_share: float
    loss: float
    test_accuracy: float
    epochs: float  # until the test accuracy of step 1; infinite if it is not reached


class SimulatedDevice(nn.Module):
    """A network that reads one pixel and sleeps for the time of a device.

    A pod runs replicas in parallel, but the emulated SDK runs them in as many threads as there are cores: therefore one
    of the local replicas sleeps for all of them.
    """

    turns, lock = itertools.count(), threading.Lock()  # shared by the replicas, which are copies of the module

    def __init__(self, channels: int, classes: int, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.head = nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map [n, channels, h, w] to [n, classes]."""
        if self.training and next(self.turns) % int(os.environ["POPDIST_NUM_LOCAL_REPLICAS"]) == 0:
            with self.lock:
                time.sleep(self.seconds)
        logits: torch.Tensor = self.head(images[:, :, 0, 0].to(self.head.weight.dtype))
        return logits


def simulated_device(channels: int, classes: int) -> nn.Module:
    """Return the network of `--model compare:simulated_device`."""
    return SimulatedDevice(channels, classes, float(os.environ[SECONDS]))


class BySample:
    """A map-style data set that applies torchvision's transforms to each image, as in the tutorial."""

    def __init__(self, images: Any, labels: Any) -> None:
        from torchvision import transforms

        self._images, self._labels = images, labels
        self._transform = transforms.Compose(
            [transforms.RandomHorizontalFlip(), transforms.Resize(64), transforms.PILToTensor()]
        )

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, int]:
        from PIL import Image

        return self._transform(Image.fromarray(self._images[index].transpose(1, 2, 0))), int(self._labels[index])


def by_sample(data_dir: str) -> Tuple[BySample, BySample, int]:
    """Return the data of `--dataset compare:by_sample`, from the files of `--dataset cifar10`."""
    from raypod.plan.resolve import from_values
    from raypod.system import torchvision_import
    from raypod.training import data as datasets

    torchvision_import.install()
    splits = datasets.load(from_values({"data": {"dataset": "cifar10", "data_dir": data_dir}}))
    train, test = splits.train, splits.test
    return BySample(train.images, train.labels), BySample(test.images, test.labels), splits.classes


def run(args: argparse.Namespace, data_dir: str, method: str, number: int, target: float) -> Row:
    """Train step `number` (from 0 on) in a subprocess; `target` is the test accuracy that counts its epochs."""
    step, flags = STEPS[number]
    is_larger = method == TRAINED and number > 0
    epochs = args.most_epochs if is_larger else args.epochs
    rate = args.learning_rate * (REPLICAS if is_larger else 1)
    sizes = [args.batch_size, args.gradient_accumulation, args.device_iterations]
    names = ["--batch-size", "--gradient-accumulation", "--device-iterations", "--epochs"]
    common = [word for name, value in zip(names, [*sizes, epochs]) for word in (name, str(value))]
    common += ["--eight-bit-io", "--async-dataloader", "--device", "emulated", "--data-dir", data_dir]
    if "--model" not in METHODS[method]:
        common += ["--model", args.model, "--learning-rate", str(rate), "--warmup-updates", "10"]
        common += ["--evaluate-every", "1"]
    seconds = args.call_ms / 1000 / (args.gradient_accumulation * args.device_iterations)
    environment = {**os.environ, SECONDS: str(seconds)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "raypod.train", *common, *METHODS[method], *flags, "--run-dir", f"{folder}/run"]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            raise SystemExit(f"{method}, {step}: {' '.join(line)} ended with {done.returncode}\n{done.stderr[-2000:]}")
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
        plan = json.loads(Path(folder, "run", "plan.json").read_text())
    images = plan["updates_per_epoch"] * plan["geometry"]["global_batch_size"]
    speed, accuracy = summary["samples_per_s"], summary["test_accuracy"]
    reached = [each["epoch"] for each in summary["evaluations"] if each["accuracy"] >= (target if number else accuracy)]
    until = float(min(reached)) if reached else math.inf
    return Row(step, images / speed, speed, summary["data_wait_share"], summary["loss"], accuracy, until)


def median_row(rows: List[Row]) -> Row:
    """Return the medians of the rounds, column by column."""
    return Row(rows[0].step, *(median(column) for column in list(zip(*rows))[1:]))


def print_table(method: str, rows: List[Row], is_trained: bool) -> None:
    """Print the steps of one method."""
    print(f"\n{method}")
    head = f"{'step':<26}{'s per epoch':>12}{'images/s':>10}{'to step 1':>11}{'waiting for data':>18}"
    print(head + (f"{'loss':>8}{'test acc':>10}{'epochs':>8}" if is_trained else ""))
    for row in rows:
        ratio = row.images_per_s / rows[0].images_per_s
        line = f"{row.step:<26}{row.epoch_s:>12.2f}{row.images_per_s:>10.0f}{ratio:>11.2f}"
        line += f"{100 * row.data_wait_share:>16.1f} %"
        print(line + (f"{row.loss:>8.3f}{row.test_accuracy:>8.1f} %{row.epochs:>8g}" if is_trained else ""))


def draw(path: Path, found: Dict[str, List[Row]], title: str) -> None:
    """Plot the seconds per epoch; the part that waits for data is darker."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(1, len(found), squeeze=False, figsize=(4.6 * len(found), 4.2))
    for axis, (method, rows) in zip(grid[0], found.items()):
        names = [f"{number}. {row.step}".replace(", ", ",\n") for number, row in enumerate(rows, start=1)]
        seconds = [row.epoch_s for row in rows]
        waiting = [row.epoch_s * row.data_wait_share for row in rows]
        axis.bar(names, seconds, color="#9ecae1", label="in the call")
        axis.bar(names, waiting, color="#08519c", label="waiting for data")
        axis.set_title(method.replace(", ", ",\n"), fontsize=10)
        axis.set_ylabel("seconds per epoch")
        axis.tick_params(axis="x", labelsize=7)
    grid[0][0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(str(path), dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Run the four steps of the last chapter of Graphcore's tutorial.")
    parser.add_argument("--data-dir", help="folder of cifar-10-batches-py; default: generated data")
    parser.add_argument("--images", type=int, default=8192, help="training images of the generated data")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--gradient-accumulation", type=int, default=2)
    parser.add_argument("--device-iterations", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--most-epochs", type=int, default=12, help="of the trained steps 2 to 4")
    parser.add_argument("--only-trained", action="store_true", help="only the method on the emulated SDK")
    parser.add_argument("--call-ms", type=float, default=60, help="time per call of the simulated device")
    parser.add_argument("--model", default="resnet8", help="model of the emulated SDK")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=1, help="alternating rounds; results are medians")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data_dir, what = args.data_dir, f"CIFAR-10 in {args.data_dir}"
        if data_dir is None:
            import make_cifar

            make_cifar.write(Path(folder), args.images, args.images // 8, 10)
            data_dir, what = folder, f"{args.images} generated images in CIFAR-10's format"
        per_call = args.batch_size * args.gradient_accumulation * args.device_iterations
        title = f"{what}; a call feeds {per_call} images per replica; simulated device: {args.call_ms:g} ms per call"
        print(f"{title}; {os.cpu_count()} cores", flush=True)
        chosen = [TRAINED] if args.only_trained else [*METHODS]
        rounds: Dict[str, List[List[Row]]] = {method: [[] for _ in STEPS] for method in chosen}
        for _ in range(args.rounds):
            for method in chosen:
                target = 0.0
                for index in range(len(STEPS)):
                    row = run(args, data_dir, method, index, target)
                    target = target if index else row.test_accuracy
                    rounds[method][index].append(row)
    found = {method: [median_row(each) for each in steps] for method, steps in rounds.items()}
    for method, rows in found.items():
        print_table(method, rows, is_trained=method == TRAINED)
    if args.plot:
        draw(args.plot, found, title)
        print(f"\nplot: {args.plot}")


if __name__ == "__main__":
    main()
