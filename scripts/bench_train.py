"""Training speed against baselines in the same run: `python scripts/bench_train.py [--rounds 5] [--work NAME ...]`.

All run the same works (bench_train_works.py): networks on synthetic images of 3x32x32, decoders on text, gradient
accumulation 2, 2 processes with one thread each, fp32.

* limit: two processes with a fixed batch, without data loading or communication: torch's own speed on these cores;
* torchrun: DistributedDataParallel over gloo, no_sync during accumulation;
* raypod: 2 instances x 1 replica under Ray.

Rounds are interleaved; figures are medians, ratios are medians over the rounds with the smallest and the largest. Then
the breakdown of the time to the first update, and the overhead per update with a model of few parameters.
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
from typing import Any, Dict, List, Optional, Sequence

from bench_train_works import WORKS

ROOT = Path(__file__).resolve().parent.parent
PEER = str(ROOT / "scripts" / "bench_train_peer.py")
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
LIMIT_S = 600


def last_json(output: str) -> Dict[str, Any]:
    return json.loads([line for line in output.splitlines() if line.startswith("{")][-1])


def run_limit(work: str, updates: int) -> float:
    command = [sys.executable, PEER, "limit", "--work", work, "--updates", str(updates)]
    processes = [subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return sum(last_json(process.communicate(timeout=LIMIT_S)[0])["per_s"] for process in processes)


def run_torchrun(work: str, updates: int) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0"]
    command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", PEER, "ddp"]
    command += ["--work", work, "--updates", str(updates)]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return last_json(done.stdout)["per_s"]


def run_raypod(*flags: str) -> Dict[str, Any]:
    """Run raypod and return the summary."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "raypod.train", "--device", "emulated", "--run-dir", f"{folder}/run", *flags]
        subprocess.run(command, env=ENV, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        return json.loads(Path(folder, "run", "summary.json").read_text())


def rate_of(summary: Dict[str, Any], unit: str) -> float:
    """Return what a run's summary states per second: images, or tokens."""
    return float(summary["samples_per_s" if unit == "images" else f"{unit}_per_s"])


def throughput(names: Sequence[str], rounds: int, updates: Optional[int]) -> None:
    rows = []
    for name in names:
        work = WORKS[name]
        count = updates or work.updates
        flags = (*work.flags, "--updates", str(count + 1))  # the first call, which compiles, is not counted
        rates: Dict[str, List[float]] = {"limit": [], "torchrun": [], "raypod": []}
        for _ in range(rounds):
            rates["limit"].append(run_limit(name, count))
            rates["torchrun"].append(run_torchrun(name, count))
            rates["raypod"].append(rate_of(run_raypod(*flags), work.unit))
            measured = "  ".join(f"{each} {values[-1]:.1f}" for each, values in rates.items())
            print(f"{name}: {work.unit}/s: {measured}", flush=True)
        medians = " | ".join(f"{median(values):.1f}" for values in rates.values())
        ratios = " | ".join(spread(rates["raypod"], rates[base]) for base in ("limit", "torchrun"))
        rows.append(f"| {work.title} | {medians} | {ratios} |")
    print("\n| 2 processes x 1 thread | limit | torchrun | raypod | of the limit | of torchrun |")
    print("|---|---|---|---|---|---|", *rows, sep="\n", flush=True)


def spread(values: Sequence[float], bases: Sequence[float]) -> str:
    """Return the median of the ratios of the rounds, and the smallest and the largest."""
    ratios = [value / base for value, base in zip(values, bases)]
    return f"{median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"


def start_up(rounds: int) -> None:
    """Run the default run until its first update."""
    summaries = [run_raypod("--updates", "1") for _ in range(rounds)]
    print("\n| from the command to the first update | s |\n|---|---|")
    for what in summaries[0]["seconds_to_start"]:
        print(f"| {what} | {median(summary['seconds_to_start'][what] for summary in summaries):.2f} |")
    print(f"| **all** | {median(summary['seconds_to_first_update'] for summary in summaries):.2f} |")


def orchestration(updates: int) -> None:
    """Train a model of 22 parameters with one image per replica: the time of an update is almost only overhead."""
    tiny = ["--dataset", "synthetic", "--image", "1x2x2", "--model", "tiny", "--batch-size", "1", "--epochs", "1000"]
    tiny += ["--replicas", "2", "--updates", str(updates)]
    rows = {
        "inline, 1 x 2": run_raypod(*tiny, "--fleet", "inline"),
        "Ray, 1 x 2": run_raypod(*tiny, "--num-instances", "1", "--fleet", "ray"),
        "Ray, 2 x 1": run_raypod(*tiny, "--num-instances", "2"),
        "Ray, 2 x 1, 16 device iterations": run_raypod(*tiny, "--num-instances", "2", "--device-iterations", "16"),
    }
    print("\n| a few parameters | microseconds per update | of inline |\n|---|---|---|")
    base = rows["inline, 1 x 2"]["samples_per_s"]
    for name, summary in rows.items():
        print(f"| {name} | {2e6 / summary['samples_per_s']:.0f} | {base / summary['samples_per_s']:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, help="measured updates (default: by the work)")
    parser.add_argument("--work", choices=list(WORKS), nargs="+", default=list(WORKS))
    parser.add_argument("--only", choices=["throughput", "start", "orchestration"])
    args = parser.parse_args()
    began = time.monotonic()
    if args.only in (None, "throughput"):
        throughput(args.work, args.rounds, args.updates)
    if args.only in (None, "start"):
        start_up(args.rounds)
    if args.only in (None, "orchestration"):
        orchestration(3200)
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
