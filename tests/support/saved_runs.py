"""Checkpoints without a training, and short trainings that write them."""

from __future__ import annotations

from pathlib import Path
from typing import Callable, Dict, List, Optional

import torch

from raypod.events import Event, RunEnded
from raypod.plan.metric import EpochSums
from raypod.plan.plan import Plan
from raypod.runs.metrics import MetricsAggregator
from raypod.runs.sinks import Sinks
from raypod.runtime.coordinator import coordinator
from raypod.runtime.workers.inline import InlineFleet
from raypod.training.checkpoint import resume, writer
from raypod.training.checkpoint.format import Checkpoint, Retention
from raypod.training.checkpoint.resume import manifest_of
from raypod.training.checkpoint.storage import checkpoints_folder


def save(
    plan: Plan,
    update: int,
    keep: int = 3,
    generation: int = 1,
    test_accuracy: Optional[float] = None,
    epoch_sums: Optional[EpochSums] = None,
) -> Checkpoint:
    """Write a checkpoint of a small state whose values are `update`."""
    optimizer = {"param_groups": [{"lr": 0.1, "params": [0]}], "momentum": torch.full((3,), float(update))}
    state = writer.State({"layer.weight": torch.full((2, 3), float(update))}, optimizer)
    tested = None if test_accuracy is None else {"accuracy": test_accuracy}
    manifest = manifest_of(plan, update, generation, "", {}, tested, epoch_sums=epoch_sums)
    return writer.write_checkpoint(checkpoints_folder(plan.run_dir), manifest, state, Retention(keep, plan.best_metric))


def run(plan: Plan, react: Callable[[Event], object] = lambda event: None) -> List[Event]:
    """Run a plan as the command line does, including the files of the run folder; return its events."""
    Path(plan.run_dir).mkdir(parents=True, exist_ok=True)
    resumed = resume.find_checkpoint(plan).checkpoint if plan.config.run.resume else None
    events = []
    with Sinks(plan) as sinks:
        for event in coordinator.run(plan, InlineFleet(plan), MetricsAggregator(plan, 0.0), resumed):
            sinks.on_event(event)
            events.append(event)
            react(event)
    return events


def weights_of(events: List[Event]) -> str:
    """Return the hash of the weights at the end of a run."""
    (ended,) = (event for event in events if isinstance(event, RunEnded))
    return ended.weights_sha256


def contents(folder: Path) -> Dict[str, bytes]:
    """Return the files of a folder and of those in it, by their relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip_a_bit(path: Path) -> None:
    """Change a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
