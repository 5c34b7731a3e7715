"""The run folder: where it lies, what is written into it before the run, and the summary after it."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from raypod.checkpoint.manifest import run_folder_of
from raypod.config import Config
from raypod.errors import ConfigError, RunError
from raypod.events import EvaluationDone, Repaired, RunEnded, RunStarted
from raypod.metrics import MetricsFold
from raypod.plan import Plan, default_run_dir
from raypod.plan_table import describe, topology
from raypod.record import run_state
from raypod.record.durable import replace_file


def choose(resolved: Config) -> str:
    """The folder of a run: the one asked for, the one that is resumed, or a new one under `runs/`."""
    resumed = run_folder_of(resolved.run.resume) if resolved.run.resume else None
    if resumed and not resolved.run.run_dir and resumed.is_dir():
        return str(resumed)
    return os.path.abspath(default_run_dir(resolved, time.strftime("%Y%m%d-%H%M%S")))  # noqa: PTH100 - keeps symlinks


def check_free(plan: Plan) -> None:
    """ConfigError if the folder holds another run than the one that goes on, or one that is over."""
    folder = Path(plan.run_dir)
    resume = plan.config.run.resume
    is_free = run_folder_of(resume) == folder.resolve() if resume else run_state.was_cut_off(folder)
    if (folder / "metrics.jsonl").exists() and not is_free:
        raise ConfigError(f"--run-dir {folder} holds a run already; choose another, or go on with --resume {folder}")


def open_for(plan: Plan) -> None:
    """Make the folder, and write the resolved config and the plan into it. ConfigError if it cannot be made."""
    folder = Path(plan.run_dir)
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        replace_file(folder / "config.yaml", plan.config.to_yaml().encode())
        replace_file(folder / "plan.json", (json.dumps(describe(plan), indent=2) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"cannot write into the run folder {folder}: {error.strerror}") from None


def write_summary(
    plan: Plan, metrics: MetricsFold, seen: Dict[type, Any], evaluations: Sequence[EvaluationDone] = ()
) -> None:
    """Write `summary.json` out of the last event of each type and all evaluations. RunError if it cannot be written."""
    started: RunStarted = seen[RunStarted]
    ended: RunEnded = seen[RunEnded]
    repaired: Optional[Repaired] = seen.get(Repaired)
    test: Optional[EvaluationDone] = seen.get(EvaluationDone)
    last = metrics.last
    summary = {
        "updates": ended.updates,
        "epochs": ended.updates / plan.updates_per_epoch,
        "loss": last.loss if last else None,
        "accuracy": last.accuracy if last else None,
        "test_accuracy": test.accuracy if test else None,
        "evaluations": _earlier_evaluations(plan, started) + [dataclasses.asdict(each) for each in evaluations],
        "samples_per_s": metrics.samples_per_s,
        "data_wait_share": metrics.data_wait_share,
        "seconds_to_first_update": metrics.first_update_s,
        "seconds_to_start": dict(started.seconds),
        "weights_sha256": ended.weights_sha256,
        "device": started.device,
        "restarts": repaired.restarts if repaired else 0,
        "topology": topology(plan),
        "interrupted": ended.interrupted,
        "checkpoint": ended.checkpoint,
    }
    path = Path(plan.run_dir) / "summary.json"
    try:
        replace_file(path, (json.dumps(summary, indent=2) + "\n").encode())
    except OSError as error:
        raise RunError(f"the run is done, and {path} cannot be written: {error.strerror}") from None


def _earlier_evaluations(plan: Plan, started: RunStarted) -> List[Any]:
    """Those that the run had made, by its last summary, before it went on from `started.first_update`."""
    path = Path(plan.run_dir) / "summary.json"
    if not started.first_update or not path.is_file():
        return []
    earlier = json.loads(path.read_text()).get("evaluations", [])
    return [each for each in earlier if each["update"] <= started.first_update]
