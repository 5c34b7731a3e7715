"""Measure the cost of checkpoints: `python scripts/bench_checkpoint.py [--rounds 15] [--megabytes 256]`.

* Save and load: seconds per GB of a state of random weights and momentum, compared with `torch.save` (with an fsync,
  for durability) and `torch.load(weights_only=True)` of the same state in the same folder. raypod hashes every byte
  while it writes, and again when `--resume` looks for the newest valid checkpoint. A snapshot is not hashed.
* Memory: the peak resident memory of a process while it saves, verifies and loads, beyond that of the state.
* Share of the training: ResNet-18 on 3x32x32 synthetic images, one checkpoint per epoch of 512 images. The work between
  two calls (reading back and copying) is measured in wall-clock time, that of the writer thread in CPU time. Finally,
  images/s with checkpoints and without, in alternating rounds.

Results are medians of interleaved rounds, with the smallest and the largest in parentheses. Compare ratios, not
absolute figures.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, List, Tuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from raypod.events import CheckpointSaved, UpdateDone
from raypod.plan.cluster import LOCAL
from raypod.plan.plan import Plan, make_plan
from raypod.plan.resolve import from_values
from raypod.runs.metrics import MetricsAggregator
from raypod.runtime.coordinator import coordinator
from raypod.runtime.workers.inline import InlineFleet
from raypod.training.checkpoint import resume, snapshots, storage, tensors, writer
from raypod.training.checkpoint.format import Retention
from raypod.training.checkpoint.resume import manifest_of
from raypod.training.checkpoint.storage import checkpoint_path, checkpoints_folder
from raypod.training.tasks.registry import facts_of

SAMPLES_PER_EPOCH = 512


def plan_in(where: str, **sections: Dict[str, Any]) -> Plan:
    config = from_values({"run": {"fleet": "inline", "device": "emulated", **sections.pop("run", {})}, **sections})
    Path(where, "run").mkdir(exist_ok=True)  # as `run_folder.create` does
    return make_plan(config, LOCAL, facts_of(config), f"{where}/run")


def timed(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


# ---- save and load --------------------------------------------------------------------------------------------------


def state_of(megabytes: int) -> writer.State:
    """Return that many MB of float32 weights and momentum, in tensors of 4 MB."""
    count = max(1, megabytes // 8)
    weights = {f"layer.{number}.weight": torch.randn(1024, 1024) for number in range(count)}
    momentum = {number: {"momentum": torch.randn(1024, 1024)} for number in range(count)}
    return writer.State(weights, {"state": momentum, "param_groups": [{"lr": 0.1, "params": list(range(count))}]})


def torch_save(state: writer.State, path: Path) -> None:
    with path.open("wb") as file:
        torch.save({"weights": state.weights, "optimizer": state.optimizer}, file)
        file.flush()
        os.fsync(file.fileno())


def snapshot(place: snapshots.Place, update: int, state: writer.State) -> None:
    snapshots.write(place, update, tensors.pack_flat({"weights": state.weights, "optimizer": state.optimizer}))


def save_and_load(rounds: int, megabytes: int) -> None:
    state, gigabytes = state_of(megabytes), 8 * max(1, megabytes // 8) * 1024**2 / 1e9
    names = ("snapshot", "save", "torch.save", "load", "verify", "torch.load")
    took: Dict[str, List[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as where, contextlib.closing(snapshots.SnapshotMemory()) as memory:
        plan, checkpoints, file = plan_in(where), checkpoints_folder(f"{where}/run"), Path(where, "torch.pt")
        kept = Retention(3, plan.best_metric)
        for number in range(rounds + 2):  # the first two are a warm-up
            manifest = manifest_of(plan, 44, 1, "", {})
            shutil.rmtree(str(checkpoints), ignore_errors=True)
            file.unlink() if file.exists() else None
            took["snapshot"].append(timed(lambda update=number: snapshot(memory.place(), update, state)))
            took["save"].append(timed(lambda m=manifest: writer.write_checkpoint(checkpoints, m, state, kept)))
            took["torch.save"].append(timed(lambda: torch_save(state, file)))
            newest = checkpoint_path(checkpoints, 44)
            took["load"].append(timed(lambda path=newest: writer.load_checkpoint(path)))
            took["torch.load"].append(timed(lambda: torch.load(str(file), weights_only=True)))
            took["verify"].append(timed(lambda: resume.newest_valid(checkpoints)))
            if number == 1:  # by then both files of the snapshots have their memory
                took = {name: [] for name in took}
    took["verify and load"] = [verify + load for verify, load in zip(took["verify"], took["load"])]
    per_gb = {name: [value / gigabytes for value in values] for name, values in took.items()}
    print(f"\n{gigabytes:.2f} GB, {rounds} rounds, load of this host {os.getloadavg()[0]:.1f}; seconds per GB\n")
    print("| | raypod | torch | ratio | target |\n|---|---|---|---|---|")
    for name, ours, theirs, target in (
        ("snapshot (a copy in memory)", per_gb["snapshot"], per_gb["torch.save"], 0.5),
        ("save (both with fsync; raypod hashes every byte)", per_gb["save"], per_gb["torch.save"], 1.1),
        ("load", per_gb["load"], per_gb["torch.load"], 1.0),
        ("find the newest valid one (hash every byte) and load", per_gb["verify and load"], per_gb["torch.load"], 1.5),
    ):
        ratio = median(ours) / median(theirs)
        print(f"| {name} | {spread(ours)} | {spread(theirs)} | {ratio:.2f} | <= {target} |")


def spread(values: List[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} - {max(values):.2f})"


# ---- memory ---------------------------------------------------------------------------------------------------------


def resident_mb(key: str) -> float:
    """Return VmRSS (now) or VmHWM (the peak since `peak_of` began) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc/self/status has no {key}")


def peak_of(action: Callable[[], Any]) -> Tuple[float, Any]:
    """Return the growth of the resident memory at its peak [MB], and the result."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident_mb("VmRSS")
    result = action()
    return resident_mb("VmHWM") - before, result


def memory_of(where: str, megabytes: int, results: Any) -> None:
    """In a fresh process: the growth [MB] while a state is saved, verified and loaded, and the size of the state."""
    logging.disable(logging.INFO)
    plan, checkpoints = plan_in(where), checkpoints_folder(f"{where}/run")
    kept = Retention(3, plan.best_metric)
    writer.write_checkpoint(checkpoints, manifest_of(plan, 4, 1, "", {}), state_of(8), kept)  # loads all modules
    writer.load_checkpoint(resume.newest_valid(checkpoints)[0].path)  # type: ignore[union-attr]
    state, manifest = state_of(megabytes), manifest_of(plan, 44, 1, "", {})
    saved, checkpoint = peak_of(lambda: writer.write_checkpoint(checkpoints, manifest, state, kept))
    verified, _ = peak_of(lambda: storage.verify(checkpoint))
    loaded, state_again = peak_of(lambda: writer.load_checkpoint(checkpoint.path))
    size = sum(record.size_bytes for record in checkpoint.manifest.files.values()) / 1e6
    results.put((saved, verified, loaded - size, len(state_again)))


def memory(megabytes: int) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as where:
        process = context.Process(target=memory_of, args=(where, megabytes, results))
        process.start()
        saved, verified, loaded, _ = results.get(timeout=300)
        process.join()
    print(f"\npeak resident memory beyond one copy of the state of {megabytes} MB\n")
    print("| | MB | of the state |\n|---|---|---|")
    for name, value in (("save", saved), ("verify", verified), ("load", loaded)):
        print(f"| {name} | {value:.1f} | {100 * value / megabytes:.1f} % |")


# ---- share of the training ------------------------------------------------------------------------------------------


class TimedFleet(InlineFleet):
    """Sums the seconds of `save`, which delay the next training call."""

    saving_s = 0.0

    def call(self, method: str, *arguments: Any) -> List[Any]:
        began = time.perf_counter()
        try:
            return super().call(method, *arguments)
        finally:
            if method == "save":
                self.saving_s += time.perf_counter() - began


class TimedWriter(writer.BackgroundWriter):
    """Sums the CPU seconds of the writer thread."""

    cpu_s = 0.0

    def _write(self, *arguments: Any) -> None:
        began = time.thread_time()
        try:
            super()._write(*arguments)
        finally:
            TimedWriter.cpu_s += time.thread_time() - began


def train(epochs: int, every: str) -> Dict[str, float]:
    """Train, and return images/s and the cost of checkpoints, without the first epoch, which compiles."""
    data = {"dataset": "synthetic", "samples": SAMPLES_PER_EPOCH, "image": "3x32x32"}
    training = {"model": "resnet18", "batch_size": 16, "epochs": epochs + 1, "learning_rate": 0.01}
    with tempfile.TemporaryDirectory() as where:
        run = {"checkpoint_every": every}
        plan = plan_in(where, data=data, training=training, pod={"replicas": 2, "num_instances": 1}, run=run)
        fleet = TimedFleet(plan)
        saved, began, ended = 0, 0.0, 0.0
        for event in coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0)):
            if isinstance(event, UpdateDone):
                ended = time.perf_counter()
                if event.update == plan.updates_per_epoch:
                    began, fleet.saving_s, TimedWriter.cpu_s = ended, 0.0, 0.0
            saved += isinstance(event, CheckpointSaved)
        size = sum(path.stat().st_size for path in Path(plan.run_dir).glob("checkpoints/update-*/*"))
        kept = len(list(Path(plan.run_dir).glob("checkpoints/update-*")))
    seconds = ended - began
    return {
        "images_per_s": epochs * SAMPLES_PER_EPOCH / seconds,
        "between_calls": fleet.saving_s / seconds,
        "thread": TimedWriter.cpu_s / seconds / (os.cpu_count() or 1),
        "saved": saved,
        "megabytes": size / kept / 1e6,
    }


def share(rounds: int, epochs: int) -> None:
    writer.BackgroundWriter = TimedWriter  # type: ignore[misc]  # before instance.py is imported
    found: Dict[str, List[Dict[str, float]]] = {"1 epoch": [], "1000 minutes": []}
    for _ in range(rounds):
        for every, results in found.items():
            results.append(train(epochs, every))
    saved, without = found["1 epoch"], found["1000 minutes"]
    pairs = [ours["images_per_s"] / theirs["images_per_s"] for ours, theirs in zip(saved, without)]
    between, thread = median(each["between_calls"] for each in saved), median(each["thread"] for each in saved)
    print(f"\n{saved[0]['megabytes']:.0f} MB per checkpoint, one per epoch of {SAMPLES_PER_EPOCH} images\n")
    print("| | of the training time |\n|---|---|")
    print(f"| between two calls: read back and copy | {100 * between:.2f} % |")
    print(f"| CPU of the writer thread, of all cores | {100 * thread:.2f} % |")
    print(f"| sum (goal: at most 2 %) | {100 * (between + thread):.2f} % |")
    rates = [median(each["images_per_s"] for each in results) for results in (saved, without)]
    print(f"\nimages/s with checkpoints {rates[0]:.1f}, without {rates[1]:.1f}, median ratio {median(pairs):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--training-rounds", type=int, default=3, help="0: no training")
    parser.add_argument("--epochs", type=int, default=2, help="of each measured training")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    save_and_load(args.rounds, args.megabytes)
    memory(args.megabytes)
    if args.training_rounds:
        share(args.training_rounds, args.epochs)


if __name__ == "__main__":
    main()
