"""`python -m raypod.train`: from the command line to a run folder."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Tuple

from raypod import checkpoint, config, coordinator, datasets
from raypod.cluster import read_cluster
from raypod.errors import ConfigError
from raypod.events import CheckpointSaved, EvaluationDone, RunEnded, RunStarted, UpdateDone
from raypod.fleet import Fleet
from raypod.metrics import JsonLines, MetricsFold
from raypod.plan import Plan, default_run_dir, make_plan
from raypod.plan_table import describe, render, topology
from raypod.progress import Progress
from raypod.shell import INTERRUPTED, report_errors


def main(argv: Optional[Sequence[str]] = None) -> int:
    """The command; returns its exit code: 0 done, 1 failed, 2 the user's mistake, 130 interrupted."""
    return report_errors(lambda: _train(sys.argv[1:] if argv is None else argv))


def plan_of(argv: Sequence[str], prog: str, extra: Sequence[str] = ()) -> Tuple[Plan, Any]:
    """The plan of a command line, and the parsed flags; `extra` names further boolean flags."""
    parser = config.FlagParser(prog=prog, description="Train a model on a pod; with nothing at all: digits.")
    config.add_flags(parser)
    for flag in extra:
        parser.add_argument(flag, action="store_true", help=_EXTRA_HELP[flag])
    args = config.parse_arguments(parser, argv)
    resolved = config.resolve(args)
    run_dir = _run_dir(resolved)
    return make_plan(resolved, read_cluster(resolved.pod.cluster), datasets.dataset_size(resolved), run_dir), args


_EXTRA_HELP = {"--dry-run": "print the plan and touch nothing", "--json": "print the plan as JSON"}


def _run_dir(resolved: config.Config) -> str:
    resume = resolved.run.resume
    if resume and not resolved.run.run_dir and Path(resume).is_dir():
        return str(Path(resume).resolve())
    return os.path.abspath(default_run_dir(resolved, time.strftime("%Y%m%d-%H%M%S")))  # noqa: PTH100 - keeps symlinks


def _train(argv: Sequence[str]) -> int:
    started_at_s = time.monotonic() - _process_age_s()
    plan, args = plan_of(argv, "raypod.train", ["--dry-run"])
    if args.dry_run:
        print(render(plan))  # noqa: T201
        return 0
    resume_from = checkpoint.find(plan.config.run.resume) if plan.config.run.resume else None
    first_update = checkpoint.check(resume_from, plan).update if resume_from else 0
    _open_run_folder(plan)
    return _run(plan, resume_from, first_update, started_at_s)


def _process_age_s() -> float:
    """Seconds since this process was started: the user has waited for the interpreter and the imports too."""
    try:
        started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:  # no Linux
        return 0.0
    return uptime_s - started_ticks / os.sysconf("SC_CLK_TCK")


def _open_run_folder(plan: Plan) -> None:
    folder = Path(plan.run_dir)
    resumed = plan.config.run.resume
    goes_on_here = resumed is not None and folder.resolve() in (
        Path(resumed).resolve(),
        *Path(resumed).resolve().parents,
    )
    if (folder / "metrics.jsonl").exists() and not goes_on_here:
        raise ConfigError(f"--run-dir {folder} holds a run already; choose another, or go on with --resume {folder}")
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create the run folder {folder}: {error.strerror}") from None
    (folder / "config.yaml").write_text(plan.config.to_yaml())
    (folder / "plan.json").write_text(json.dumps(describe(plan), indent=2) + "\n")


def _run(plan: Plan, resume_from: Optional[Path], first_update: int, started_at_s: float) -> int:
    progress = Progress(plan)
    progress.begin()
    metrics = MetricsFold(plan, started_at_s)
    seen: Dict[type, Any] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(progress.close)
        events = stack.enter_context(contextlib.closing(coordinator.run(plan, _fleet(plan), metrics, resume_from)))
        for event in events:
            seen[type(event)] = event
            if isinstance(event, RunStarted):  # not before: a run that could not start leaves its folder free
                lines = JsonLines(Path(plan.run_dir) / "metrics.jsonl", first_update)
                stack.callback(lines.close)
            elif isinstance(event, UpdateDone):
                lines.write(event)
            elif isinstance(event, CheckpointSaved):
                lines.flush()
            progress.show(event)
    _write_summary(plan, metrics, seen)
    print(f"Everything else: {plan.run_dir}")  # noqa: T201
    return INTERRUPTED if seen[RunEnded].interrupted else 0


def _fleet(plan: Plan) -> Fleet:
    # Only the chosen fleet is imported: the inline one works without Ray.
    if plan.config.run.fleet == "inline":
        from raypod.fleet.inline import InlineFleet

        return InlineFleet(plan)
    from raypod.fleet.ray import RayFleet

    return RayFleet(plan)


def _write_summary(plan: Plan, metrics: MetricsFold, seen: Dict[type, Any]) -> None:
    started: RunStarted = seen[RunStarted]
    ended: RunEnded = seen[RunEnded]
    test: Optional[EvaluationDone] = seen.get(EvaluationDone)
    last = metrics.last
    summary = {
        "updates": ended.updates,
        "epochs": ended.updates / plan.updates_per_epoch,
        "loss": last.loss if last else None,
        "accuracy": last.accuracy if last else None,
        "test_accuracy": test.accuracy if test else None,
        "samples_per_s": metrics.samples_per_s,
        "seconds_to_first_update": metrics.first_update_s,
        "seconds_to_start": dict(started.seconds),
        "weights_sha256": ended.weights_sha256,
        "device": started.device,
        "restarts": 0,
        "topology": topology(plan),
        "interrupted": ended.interrupted,
        "checkpoint": ended.checkpoint,
    }
    path = Path(plan.run_dir) / "summary.json"
    partial = path.with_name("summary.json.partial")
    partial.write_text(json.dumps(summary, indent=2) + "\n")
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
