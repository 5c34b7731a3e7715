"""Host memory of a training against torchrun: `python scripts/bench_memory.py [--rounds 5] [--work NAME ...]`.

The default run and two instances of ResNet-50; under torchrun a plain PyTorch program that imports nothing of raypod
trains the same network with 2 processes of one thread each. Memory is sampled five times a second over all processes
that the command started, Ray's included. The sum is that of the proportional shares (PSS), in which a page that several
processes share counts once; beside it the resident memory, in which it counts for each. Figures are those of the sample
with the largest sum of shares.

Rounds are interleaved; figures are medians, ratios are medians over the rounds with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Dict, List, NamedTuple, Sequence, Tuple

import psutil
from bench_train import ENV, LIMIT_S, ROOT, spread
from bench_train_works import WORKS

_INTERVAL_S = 0.2
_MIB = 1 << 20
_TORCHRUN = "torch.distributed.run"
# Words of a command line, and what the process is; the first that is found counts.
_KINDS = (
    (_TORCHRUN, "torchrun"),
    ("raylet/raylet", "raylet with object store"),  # its command line has those of workers
    ("peer.py", "rank"),
    ("raypod.train", "coordinator"),
    ("ray::DashboardAgent", "agents of Ray"),
    ("ray::RuntimeEnvAgent", "agents of Ray"),
    ("ray::", "instance"),
    ("default_worker.py", "instance"),
    ("gcs_server", "GCS"),
    ("worker_template.py", "template"),
    ("ray_reaper.py", "reaper"),
)
_PEER = """
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, relu
from torch.nn.parallel import DistributedDataParallel


def conv(inputs, outputs, size, stride=1):
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs))


class Block(nn.Module):
    def __init__(self, body, inputs, outputs, stride):
        super().__init__()
        self.body = body
        self.skip = nn.Identity() if (inputs, stride) == (outputs, 1) else conv(inputs, outputs, 1, stride)

    def forward(self, x):
        return relu(self.body(x) + self.skip(x))


def basic(inputs, width, stride):
    return Block(nn.Sequential(conv(inputs, width, 3, stride), nn.ReLU(), conv(width, width, 3)), inputs, width, stride)


def bottleneck(inputs, width, stride):
    layers = conv(inputs, width, 1), nn.ReLU(), conv(width, width, 3, stride), nn.ReLU(), conv(width, 4 * width, 1)
    return Block(nn.Sequential(*layers), inputs, 4 * width, stride)


def network(work):
    if work == "default":
        first, blocks, width = conv(1, 16, 3), [basic(16, 16, 1), basic(16, 32, 2), basic(32, 64, 2)], 64
    else:
        first, blocks, width = conv(3, 64, 3), [], 64
        for stage, count in enumerate((3, 4, 6, 3)):
            for number in range(count):
                blocks.append(bottleneck(width, 64 << stage, 2 if stage and not number else 1))
                width = 256 << stage
    return nn.Sequential(first, nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


work, updates, accumulation = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(network(work))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
shape = (1, 8, 8) if work == "default" else (3, 32, 32)
data = torch.utils.data.TensorDataset(torch.randn(1024, *shape), torch.randint(10, (1024,)))
loader = torch.utils.data.DataLoader(data, 16, sampler=torch.utils.data.DistributedSampler(data))
batches = [batch for _ in range(1 + updates * accumulation // len(loader)) for batch in loader]
for update in range(updates):
    optimizer.zero_grad()
    for step in range(accumulation):
        images, labels = batches[update * accumulation + step]
        cross_entropy(model(images), labels).backward()
    optimizer.step()
dist.barrier()
os._exit(0)  # an orderly end of DDP over gloo sometimes never returns, or aborts
"""


class Work(NamedTuple):
    """A training: its title, the flags of raypod, and the updates and gradient accumulation of both."""

    title: str
    flags: Tuple[str, ...]
    updates: int
    accumulation: int


_WORKS = {
    "default": Work("the default run, 2 x 2 replicas", ("--epochs", "4"), 176, 1),
    "resnet50": Work("2 x ResNet-50, 3x32x32", WORKS["resnet50"].flags, 4, 2),
}


class Sample(NamedTuple):
    """The memory of all processes of a command at one time.

    Attributes:
        shares: MiB by kind of process, as proportional shares.
        resident_mib: the sum of the resident memory.
    """

    shares: Dict[str, float]
    resident_mib: float

    @property
    def total_mib(self) -> float:
        """The sum of the shares."""
        return sum(self.shares.values())


def sample(process: psutil.Process) -> Sample:
    """Measure a process and its descendants."""
    shares: Dict[str, float] = defaultdict(float)
    resident = 0
    for each in [process, *process.children(recursive=True)]:
        try:
            memory, line = each.memory_full_info(), " ".join(each.cmdline())
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        kind = next((kind for word, kind in _KINDS if word in line), "other processes")
        shares[kind] += memory.pss / _MIB
        resident += memory.rss
    return Sample(dict(shares), resident / _MIB)


def largest(command: Sequence[str]) -> Sample:
    """Run a command and return the sample with the largest sum. Raises RuntimeError with its output if it fails."""
    with tempfile.TemporaryFile() as output:
        started = subprocess.Popen(command, env=ENV, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        process, samples, deadline = psutil.Process(started.pid), [], time.monotonic() + LIMIT_S
        while started.poll() is None:
            if time.monotonic() > deadline:
                started.kill()
            samples.append(sample(process))
            time.sleep(_INTERVAL_S)
        if started.returncode:
            output.seek(0)
            raise RuntimeError(output.read().decode())
    return max(samples, key=lambda each: each.total_mib)


def raypod(work: Work) -> Sample:
    """Measure a run of raypod with 2 instances."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*work.flags, "--updates", str(work.updates), "--device", "emulated", "--run-dir", f"{folder}/run"]
        return largest([sys.executable, "-m", "raypod.train", *flags])


def torchrun(name: str, work: Work) -> Sample:
    """Measure the same training with DistributedDataParallel, 2 processes."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "peer.py")
        script.write_text(_PEER)
        command = [sys.executable, "-m", _TORCHRUN, "--nproc_per_node=2", "--standalone"]
        return largest([*command, str(script), name, str(work.updates), str(work.accumulation)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", choices=list(_WORKS), nargs="+", default=list(_WORKS))
    args = parser.parse_args()
    rows: List[str] = []
    for work in args.work:
        measured: Dict[str, List[Sample]] = {"torchrun": [], "raypod": []}
        for _ in range(args.rounds):
            measured["torchrun"].append(torchrun(work, _WORKS[work]))
            measured["raypod"].append(raypod(_WORKS[work]))
            found = ", ".join(f"{name} {each[-1].total_mib:.0f} MiB" for name, each in measured.items())
            print(f"{work}: {found}", flush=True)
        shares = {name: [each.total_mib for each in found] for name, found in measured.items()}
        resident = {name: [each.resident_mib for each in found] for name, found in measured.items()}
        for name, found in measured.items():
            for kind in sorted({kind for each in found for kind in each.shares}):
                rows.append(f"| {name} | {kind} | {median(each.shares.get(kind, 0.0) for each in found):.0f} | | |")
            rows.append(
                f"| {name} | **all** | {median(shares[name]):.0f} | {spread(shares[name], shares['torchrun'])} | "
                f"{median(resident[name]):.0f} ({spread(resident[name], resident['torchrun'])}) |"
            )
        print(f"\n| {_WORKS[work].title} | processes | MiB (PSS) | of torchrun | MiB resident (of torchrun) |")
        print("|---|---|---|---|---|", *rows, "", sep="\n", flush=True)
        rows.clear()


if __name__ == "__main__":
    main()
