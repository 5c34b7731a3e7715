"""Measure the host memory of a data set: `python scripts/measure_data_memory.py [--data-dir FOLDER] [--instances 4]`.

Each process loads CIFAR-10 and gathers every image once, as an instance does. While all of them run, each reports its
proportional share (PSS) of the pages mapped from the cache, and the growth of its private memory since before loading.
The sum over 4 processes is compared with that of one process; the goal is a ratio of at most 1.3.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import List, Tuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

LIMIT_S = 120

MEMBER = """
import sys
import numpy as np
from raypod import datasets
from raypod.training.data import transforms
from raypod.plan.resolve import from_values

def kib(keys, path=""):
    found, counts = 0, False
    for line in open("/proc/self/smaps"):
        first = line.split()[0]
        if not first.endswith(":"):
            counts = path in line
        elif counts and first in keys:
            found += int(line.split()[1])
    return found

before = kib(("Private_Dirty:",))
config = from_values({"data": {"dataset": "cifar10", "data_dir": sys.argv[1]}})
splits = datasets.load(config)
for split in (splits.train, splits.test):
    for samples in np.array_split(np.random.default_rng(0).permutation(len(split)), 50):
        transforms.gather(split, samples, splits.augmentation, (1, 0))
print("ready", flush=True)
input()  # until all processes are ready
print(kib(("Pss:",), ".npy"), max(0, kib(("Private_Dirty:",)) - before), flush=True)
input()  # until all processes have measured
"""


def measure(data_dir: str, processes: int) -> Tuple[int, int]:
    """Return (mapped, private) KiB, summed over the processes."""
    line = [sys.executable, "-c", MEMBER, data_dir]
    pipe = subprocess.PIPE
    members = [subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True, cwd=str(ROOT)) for _ in range(processes)]
    try:
        for member in members:
            assert member.stdout is not None
            assert member.stdout.readline() == "ready\n", "a process did not load the data"
        found: List[List[int]] = []
        for member in members:
            assert member.stdin is not None
            assert member.stdout is not None
            member.stdin.write("\n")
            member.stdin.flush()
            found.append([int(word) for word in member.stdout.readline().split()])
        for member in members:
            member.communicate("\n", timeout=LIMIT_S)
    finally:
        for member in members:
            member.kill()
            member.wait()
    return sum(mapped for mapped, _ in found), sum(private for _, private in found)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description="Compare the memory of the data of one and of several instances of a host."
    )
    parser.add_argument("--data-dir", help="folder of cifar-10-batches-py; default: generated data")
    parser.add_argument("--instances", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        if args.data_dir is None:
            import make_cifar

            make_cifar.write(Path(made), train=50000, test=10000, classes=10)
        data_dir = args.data_dir or made
        measure(data_dir, 1)  # creates the cache
        print("| processes | mapped, MiB (PSS) | private growth, MiB | together | ratio to one (goal <= 1.3) |")
        print("|---|---|---|---|---|")
        one = 0
        for processes in (1, args.instances):
            mapped, private = measure(data_dir, processes)
            one = one or mapped + private
            cells = f"{mapped / 1024:.1f} | {private / 1024:.1f} | {(mapped + private) / 1024:.1f}"
            print(f"| {processes} | {cells} | {(mapped + private) / one:.2f} |")


if __name__ == "__main__":
    main()
