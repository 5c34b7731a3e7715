"""The time that a run is interrupted by a killed instance: `python scripts/bench_recovery.py [--rounds 3]`.

Two processes train a small ResNet on 8x8 images, 16 samples each; one is killed (SIGKILL). Measured are the seconds
from there to the first update that had not been done before, and the updates that are repeated:

* raypod: 2 instances; the lost one is replaced, the other keeps its process and its state;
* raypod with `--standby 1`: the same, and a process with SDK and data loaded takes the place of the lost one;
* Ray Train: TorchTrainer with max_failures, DDP over gloo; all workers restart from the last checkpoint, which is
  written every 50 updates.

Rounds are interleaved. Ray Train needs pyarrow and pandas (`pip install pyarrow pandas`); raypod does not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Dict, List, Tuple

ROOT = Path(__file__).resolve().parent.parent
PEER = str(ROOT / "scripts" / "bench_recovery_peer.py")
PATH = ":".join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH}
KILL_AFTER = 120  # updates
LIMIT_S = 240.0
PREPARE_S = 15.0  # after the first update, for a standby to be prepared
GOAL = 0.22

Result = Tuple[float, int]  # seconds, repeated updates


def lines_of(file: Path) -> List[str]:
    """Return the lines of a file that another process writes."""
    return file.read_text().splitlines(keepends=True) if file.is_file() else []


def raypod(standby: int) -> Result:
    """Measure raypod, from its events."""
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-c", RAYPOD, f"{folder}/run", str(KILL_AFTER), str(standby), str(PREPARE_S)]
        done = subprocess.run(program, env=ENV, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        found = json.loads(done.stdout.splitlines()[-1])
        return found["seconds"], found["lost"]


RAYPOD = """
import contextlib, json, os, signal, sys, time
from pathlib import Path
from raypod.runtime.coordinator import coordinator
from raypod.runs import run_folder
from raypod.plan.cluster import LOCAL
from raypod.plan.resolve import from_values
from raypod.training.tasks.registry import facts_of
from raypod.events import Repaired, UpdateDone
from raypod.runtime.workers.ray import RayFleet
from raypod.runs.metrics import MetricsAggregator
from raypod.plan.plan import make_plan

training = {"batch_size": 16, "epochs": 1000, "lr_schedule": "constant", "updates": 40000}
pod = {"replicas": 2, "num_instances": 2}
standby, prepare_s = int(sys.argv[3]), float(sys.argv[4])
config = from_values({"run": {"device": "emulated", "standby": standby}, "training": training, "pod": pod})
plan = make_plan(config, LOCAL, facts_of(config), sys.argv[1])
run_folder.create(plan)
killed_s = repaired = first_s = None
updates = []
with contextlib.closing(coordinator.run(plan, RayFleet(plan), MetricsAggregator(plan, 0.0))) as events:
    for event in events:
        if isinstance(event, Repaired):
            repaired = event
        elif isinstance(event, UpdateDone):
            updates.append(event.update)
            first_s = first_s or time.monotonic()
            is_prepared = not standby or time.monotonic() > first_s + prepare_s
            if killed_s is None and event.update >= int(sys.argv[2]) and is_prepared:
                text = Path(plan.log_file(1)).read_text()
                os.kill(int(text.rpartition(", pid ")[2].partition(":")[0]), signal.SIGKILL)
                killed_s = time.monotonic()
            elif repaired is not None and event.update > repaired.update:
                seconds = time.monotonic() - killed_s
                break
print(json.dumps({"seconds": seconds, "lost": len(updates) - len(set(updates))}))
"""


def ray_train() -> Result:
    """Measure Ray Train, from the lines that rank 0 writes; after the restart some updates are repeated."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "updates")
        command = [sys.executable, PEER, "--file", str(file), "--folder", folder]
        pipe = subprocess.PIPE
        trainer = subprocess.Popen(command, env=ENV, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        try:
            updates = _wait(trainer, file, KILL_AFTER)
            victim = next(int(line.split()[2]) for line in reversed(lines_of(file)) if line.startswith("1 "))
            os.kill(victim, signal.SIGKILL)
            killed_s = time.monotonic()
            time.sleep(0.5)  # for the update that rank 0 has begun
            done = max(max(_updates(file)), updates)
            _wait(trainer, file, done + 1)
            resumed_s = time.monotonic()
            seen = _updates(file)
        finally:
            trainer.send_signal(signal.SIGINT)
            try:
                trainer.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(trainer.pid, signal.SIGKILL)
                trainer.communicate()
        return resumed_s - killed_s, len(seen) - len(set(seen))


def _updates(file: Path) -> List[int]:
    return [int(line.split()[1]) for line in lines_of(file) if line.startswith("0 ") and line.endswith("\n")]


def _wait(trainer: subprocess.Popen[str], file: Path, update: int) -> int:
    """Wait until rank 0 has done `update`; return its last update."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := _last(file)) >= update:
        if trainer.poll() is not None:
            raise RuntimeError(trainer.communicate()[1])
        if time.monotonic() > deadline:
            raise RuntimeError(f"no update {update} within {LIMIT_S:g} s")
        time.sleep(0.01)
    return found


def _last(file: Path) -> int:
    return max(_updates(file), default=0)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    found: Dict[str, List[Result]] = {"Ray Train": [], "raypod": [], "raypod --standby 1": []}
    for number in range(rounds):
        found["Ray Train"].append(ray_train())
        found["raypod"].append(raypod(0))
        found["raypod --standby 1"].append(raypod(1))
        line = ", ".join(f"{name} {results[-1][0]:.1f} s" for name, results in found.items())
        print(f"round {number + 1}: {line}", flush=True)
    print("\n| | s from the kill to the first new update | of Ray Train | updates repeated |\n|---|---|---|---|")
    of_peer = [seconds for seconds, _ in found["Ray Train"]]
    for name, results in found.items():
        ratio = median(seconds / peer for (seconds, _), peer in zip(results, of_peer))
        seconds, lost = median(each[0] for each in results), median(each[1] for each in results)
        print(f"| {name} | {seconds:.1f} | {ratio:.2f} | {lost:g} |")
    print(f"\ngoal: at most {GOAL} of Ray Train, and no update repeated")


if __name__ == "__main__":
    main()
