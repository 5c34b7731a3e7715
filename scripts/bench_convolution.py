"""Convolutions of the emulated device against torch's kernels: `python scripts/bench_convolution.py [--rounds 5]`.

Forward and backward pass of layers of ResNets with micro-batches of 16 images of 32x32, and of 4 of 224x224, in
channels_last, fp32, one thread. `kernel` is what the device chooses. Rounds are interleaved; the ratio is the median of
torch's time divided by the device's, with the smallest and the largest round. `error` is the norm of the difference of
the output to that in float64, divided by its norm.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path
from statistics import median
from typing import List, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "raypod" / "emulated_sdk")]

import torch  # noqa: E402
from poptorch.device.kernels import Accumulating, convolution  # noqa: E402
from torch import nn  # noqa: E402

from raypod.system.process import keep_freed_memory  # noqa: E402

_NAMES = {"_ProductBackward": "product", "_WinogradBackward": "Winograd", "ConvolutionBackward0": "torch"}


class Shape(NamedTuple):
    """A layer: samples, channels, output channels, image size, kernel and stride."""

    samples: int
    channels: int
    out_channels: int
    size: int
    kernel: int = 3
    stride: int = 1


SHAPES = [
    *(Shape(16, 64, 64, 32), Shape(16, 128, 128, 16), Shape(16, 256, 256, 8), Shape(16, 512, 512, 4)),
    *(Shape(16, 512, 512, 2), Shape(16, 512, 512, 1), Shape(16, 128, 256, 16, stride=2)),
    *(Shape(16, 64, 256, 32, kernel=1), Shape(16, 512, 2048, 4, kernel=1)),
    *(Shape(4, 64, 64, 56), Shape(4, 128, 128, 28), Shape(4, 256, 256, 14), Shape(4, 512, 512, 7)),
]


def step_s(layer: nn.Conv2d, images: torch.Tensor, gradient: torch.Tensor) -> float:
    """Return the seconds of a forward and a backward pass that adds to the gradient of the weights."""
    began = time.perf_counter()
    with Accumulating():
        layer(images).backward(gradient)
    seconds = time.perf_counter() - began
    images.grad = None
    return seconds


def row(shape: Shape, rounds: int) -> str:
    """Measure a layer; return its row of the table."""
    torch.manual_seed(0)
    padding = shape.kernel // 2
    plain = nn.Conv2d(shape.channels, shape.out_channels, shape.kernel, shape.stride, padding, bias=False)
    plain.to(memory_format=torch.channels_last)
    device = copy.deepcopy(plain)
    convolution.specialize(device)
    images = torch.randn(shape.samples, shape.channels, shape.size, shape.size).relu_()
    images = images.to(memory_format=torch.channels_last).requires_grad_()
    result = device(images)
    with torch.no_grad():
        exact = copy.deepcopy(plain).double()(images.double())
        errors = [float((each - exact).norm() / exact.norm()) for each in (plain(images).double(), result.double())]
    gradient = torch.randn_like(result)
    times: List[List[float]] = [[], []]
    for round_ in range(rounds + 1):
        for layer, found in zip((plain, device), times):
            seconds = min(step_s(layer, images, gradient) for _ in range(3))
            if round_:  # the first one warms up
                found.append(seconds)
    ratios = [torch_s / device_s for torch_s, device_s in zip(*times)]
    name = f"{shape.channels} -> {shape.out_channels}, {shape.kernel}x{shape.kernel}"
    name += f", stride {shape.stride}" * (shape.stride > 1)
    return (
        f"| {name}, {shape.samples} images of {shape.size}x{shape.size} | {_NAMES[type(result.grad_fn).__name__]} | "
        f"{1e3 * median(times[0]):.2f} | {1e3 * median(times[1]):.2f} | "
        f"{median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f}) | {errors[0]:.0e} | {errors[1]:.0e} |"
    )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as an instance does
    print("| layer | kernel | torch, ms | device, ms | ratio | error of torch | error |\n|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        print(row(shape, args.rounds), flush=True)


if __name__ == "__main__":
    main()
