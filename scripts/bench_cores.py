"""Throughput for several divisions of two cores: `python scripts/bench_cores.py [--rounds 5]`.

ResNet-18 with a 7x7 stem on 3x32x32 synthetic images, micro-batch 16, gradient accumulation 2, fp32, trained by
`raypod.train` on the emulated SDK, in interleaved rounds. "scaling" is relative to one replica with one thread.
Configurations that differ only in `--num-instances` or in `--bind-cores` must have the same weights; the script checks.
"""

from __future__ import annotations

import argparse
import signal
import statistics
from typing import Dict, List, Tuple

from bench_train import run_raypod

WORK = (
    *("--dataset", "synthetic", "--samples", "1024", "--image", "3x32x32", "--model", "resnet18", "--stem", "imagenet"),
    *("--batch-size", "16", "--gradient-accumulation", "2", "--epochs", "100"),
)
INLINE = ("--fleet", "inline")  # starts faster than Ray
# Name, replicas, instances, threads per replica, further flags; and which of them must have the same weights.
CASES: Tuple[Tuple[str, int, int, int, Tuple[str, ...], str], ...] = (
    ("1 replica x 1 thread", 1, 1, 1, INLINE, "one"),
    ("1 replica x 2 threads", 1, 1, 2, INLINE, "one with two threads"),
    ("1 instance x 2 replicas x 1 thread", 2, 1, 1, INLINE, "two"),
    ("2 instances x 1 replica x 1 thread", 2, 2, 1, (), "two"),
    ("2 instances x 1 replica x 1 thread, `--bind-cores`", 2, 2, 1, ("--bind-cores",), "two"),
    ("2 instances x 2 replicas x 1 thread", 4, 2, 1, (), "four"),
    ("1 instance x 4 replicas x 1 thread", 4, 1, 1, INLINE, "four"),
)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=8, help="of one replica; half as many of two")
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)), help="numbers of rows, from 0")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the rounds so far are printed
    rates: Dict[str, List[float]] = {case[0]: [] for case in CASES}
    weights: Dict[str, str] = {}
    try:
        for _ in range(args.rounds):
            for name, replicas, instances, threads, flags, group in [CASES[number] for number in args.cases]:
                updates = max(3, 2 * args.updates // (1 + replicas))
                sizes = ["--replicas", str(replicas), "--num-instances", str(instances)]
                sizes += ["--threads-per-replica", str(threads), "--updates", str(updates)]
                summary = run_raypod(*WORK, *sizes, *flags)
                assert weights.setdefault(group, summary["weights_sha256"]) == summary["weights_sha256"], name
                rates[name].append(summary["samples_per_s"])
    finally:
        print_table(rates)


def print_table(rates: Dict[str, List[float]]) -> None:
    """Print the medians of all rounds so far."""
    print("| two cores | images/s | scaling |\n|---|---|---|")
    for name, each in rates.items():
        if each:
            median, one = statistics.median(each), statistics.median(rates[CASES[0][0]])
            print(f"| {name} | {median:.1f} ({min(each):.1f} - {max(each):.1f}) | {median / one:.2f} |", flush=True)


if __name__ == "__main__":
    main()
