"""Overhead of emulation against plain torch in the same run: `python scripts/bench_sdk.py [--rounds 5] [--only PART]`.

* loop: a training loop of one replica (ResNet-18 on 3x32x32, micro-batch 16, SGD with momentum) through poptorch, and
  the same loop in torch, alternating step by step in one process, on 1 and on 2 threads; and each in its own process
  for the peak memory;
* replicas: a call of 8 replicas on one core, against 8 calls of one replica on it;
* first: `import poptorch` on top of `import torch`, in seconds, each in a new process; and the first call of a
  `trainingModel`, less the second call: what tracing and compiling take, in forward passes of plain torch with the same
  micro-batch. One thread; plain torch has run before in the process, so that its kernels are prepared for both;
* loader: poptorch.DataLoader in Async mode with 2 workers, against torch's DataLoader with 2 workers on the same data.

Ratios are medians over the rounds. The target is a lower or upper bound of the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, List, Tuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "raypod" / "emulated_sdk")]

import poptorch  # noqa: E402 - needs sys.path
import torch  # noqa: E402
from torch.nn import functional  # noqa: E402

MICRO_BATCH = 16
LIMIT_S = 600
Row = Tuple[str, str, float, str]


class ResNetWithLoss(torch.nn.Module):
    """ResNet-18 for small images, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        from raypod.plan.resolve import from_values
        from raypod.training.models import networks

        torch.manual_seed(0)
        config = from_values({"data": {"dataset": "synthetic"}, "training": {"model": "resnet18"}})
        self.network = networks.build_model(config, 3, 32, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        logits = self.network(images)
        return logits, functional.cross_entropy(logits, labels)


def batch(replicas: int = 1) -> Tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = replicas * MICRO_BATCH
    return torch.randn(size, 3, 32, 32, generator=generator), torch.arange(size) % 10


def plain_step() -> Callable[[], float]:
    """One training step in plain torch."""
    model = ResNetWithLoss().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = batch()

    def step() -> float:
        optimizer.zero_grad()
        _, loss = model(images, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def emulated_step(replicas: int = 1) -> Callable[[], float]:
    """One training step with PopTorch."""
    model = ResNetWithLoss().train()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    training = poptorch.trainingModel(model, poptorch.Options().replicationFactor(replicas), optimizer)
    images, labels = batch(replicas)
    return lambda: training(images, labels)[1].mean().item()


STEPS = {"plain torch": plain_step, "emulated": emulated_step}


def seconds(work: Callable[[], Any], times: int = 1) -> float:
    began = time.perf_counter()
    for _ in range(times):
        work()
    return time.perf_counter() - began


def loop(rounds: int) -> List[Row]:
    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        steps = {name: make() for name, make in STEPS.items()}
        for step in steps.values():
            step(), step()  # compile and warm up
        taken: Dict[str, List[float]] = {name: [] for name in steps}
        for round_ in range(8 * rounds):
            for name in list(steps)[:: 1 if round_ % 2 else -1]:
                taken[name].append(seconds(steps[name]))
        ratio = median(a / b for a, b in zip(taken["plain torch"], taken["emulated"]))
        rates = ", ".join(f"{name} {MICRO_BATCH / median(values):.1f}" for name, values in taken.items())
        rows.append((f"one replica, {threads} thread{'s' * (threads > 1)}", f"images/s: {rates}", ratio, ">= 0.95"))
    peaks = {name: median(peak_mib(name) for _ in range(min(rounds, 3))) for name in STEPS}
    figures = "peak MiB: " + ", ".join(f"{name} {peak:.0f}" for name, peak in peaks.items())
    return [*rows, ("memory of one replica", figures, peaks["emulated"] / peaks["plain torch"], "<= 1.25")]


def peak_mib(name: str) -> float:
    """Peak memory in MiB of a process that runs 4 steps; the imports are included for both."""
    command = [sys.executable, __file__, "--peak", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return float(json.loads(done.stdout)["peak_mib"])


def replicas(rounds: int) -> List[Row]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # on two cores replicas run in parallel, which hides their overhead
    try:
        torch.set_num_threads(1)
        one, eight = emulated_step(), emulated_step(8)
        one(), eight()
        taken = [(seconds(one, times=8), seconds(eight)) for _ in range(2 * rounds)]
    finally:
        os.sched_setaffinity(0, cores)
    figures = f"s: 8 x 1 replica {median(a for a, _ in taken):.2f}, 8 replicas {median(b for _, b in taken):.2f}"
    return [("8 replicas on one core", figures, median(b / a for a, b in taken), "<= 1.05")]


IMPORTS = """
import time
import torch
began = time.perf_counter()
import poptorch
print(time.perf_counter() - began)
"""


def first(rounds: int) -> List[Row]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'raypod' / 'emulated_sdk'}"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", IMPORTS]
    imports = [
        float(subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=LIMIT_S, check=True).stdout)
        for _ in range(rounds + 1)
    ][1:]  # the first one writes the byte code
    torch.set_num_threads(1)
    model, data = ResNetWithLoss().train(), batch()
    plain_step()()
    taken = []
    for _ in range(rounds):
        forward = seconds(lambda: model(*data))
        step = emulated_step()
        taken.append((seconds(step), seconds(step), forward))
    call, later, forward = (median(column) for column in zip(*taken))
    ratio = median((one - two) / each for one, two, each in taken)
    figures = f"s: first call {call:.2f}, second {later:.2f}, forward pass {forward:.2f}"
    return [
        ("import poptorch on top of torch, s", f"s: {_spread(imports)}", median(imports), "<= 1.20"),
        ("compilation, in forward passes", figures, ratio, "<= 1.30"),
    ]


def _spread(values: List[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} - {max(values):.2f})"


class Images(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Small images, shifted and flipped one by one as torchvision's transforms do."""

    def __init__(self, samples: int) -> None:
        self.images = torch.randint(0, 256, (samples, 3, 40, 40), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, int]:
        top, left = torch.randint(0, 8, (2,)).tolist()
        image = self.images[index, :, top : top + 32, left : left + 32].float().sub_(127.5).div_(64)
        return (image.flip(-1) if index % 2 else image), index % 10


def loader(rounds: int) -> List[Row]:
    data, size = Images(8192), 64
    options = poptorch.Options()
    ours = poptorch.DataLoader(options, data, size, num_workers=2, mode=poptorch.DataLoaderMode.Async)
    theirs = torch.utils.data.DataLoader(data, size, num_workers=2, drop_last=True, persistent_workers=True)
    samples = len(data) // size * size

    def epoch(source: Any) -> float:
        return samples / seconds(lambda: [images[0, 0, 0, 0].item() for images, _ in source])

    try:
        epoch(ours), epoch(theirs)  # start the workers
        rates = []
        for round_ in range(2 * rounds):
            pair = {each: epoch(each) for each in ((ours, theirs) if round_ % 2 else (theirs, ours))}
            rates.append((pair[ours], pair[theirs]))
    finally:
        ours.terminate()
    figures = f"samples/s: torch {median(b for _, b in rates):.0f}, Async {median(a for a, _ in rates):.0f}"
    return [("Async with 2 workers, of torch with 2", figures, median(a / b for a, b in rates), ">= 1.00")]


PARTS: Dict[str, Callable[[int], List[Row]]] = {"first": first, "loop": loop, "replicas": replicas, "loader": loader}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=sorted(PARTS))
    parser.add_argument("--peak", choices=sorted(STEPS), help="print the peak memory of a few steps and exit")
    args = parser.parse_args()
    if args.peak:
        torch.set_num_threads(1)
        step = STEPS[args.peak]()
        for _ in range(4):
            step()
        print(json.dumps({"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
        return
    began = time.monotonic()
    rows = [row for name, part in PARTS.items() if args.only in (None, name) for row in part(args.rounds)]
    print("| what | measured | ratio | target | |\n|---|---|---|---|---|")
    for what, measured, ratio, target in rows:
        bound = float(target.split()[1])
        met = ratio >= bound if target.startswith(">") else ratio <= bound
        print(f"| {what} | {measured} | {ratio:.2f} | {target} | {'met' if met else 'missed'} |")
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
