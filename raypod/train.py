"""`python -m raypod.train`: from the command line to a run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Tuple

from raypod import cli, datasets, detached
from raypod.checkpoint import resume
from raypod.cli import INTERRUPTED, report_errors
from raypod.coordinator import coordinator
from raypod.events import EvaluationDone, RunEnded
from raypod.fleet.base import Fleet
from raypod.host.process import process_age_s
from raypod.plan import resolve
from raypod.plan.cluster import read_cluster
from raypod.plan.plan import Plan, make_plan
from raypod.plan.tables import describe, render
from raypod.record import run_folder, run_state
from raypod.record.metrics import MetricsFold
from raypod.record.progress import Progress
from raypod.record.sinks import Sinks


def main(argv: Optional[Sequence[str]] = None) -> int:
    """The command; returns its exit code: 0 done, 1 failed, 2 the user's mistake, 130 interrupted."""
    return report_errors(lambda: _train(sys.argv[1:] if argv is None else argv))


def plan_of(argv: Sequence[str], prog: str, extra: Sequence[str] = ()) -> Tuple[Plan, Any]:
    """The plan of a command line, and the parsed flags; `extra` names further boolean flags."""
    parser = cli.FlagParser(prog=prog, description="Train a model on a pod; with nothing at all: digits.")
    resolve.add_flags(parser)
    for flag in extra:
        parser.add_argument(flag, action="store_true", help=_EXTRA_HELP[flag])
    args = resolve.parse_arguments(parser, argv)
    read = functools.lru_cache(maxsize=1)(read_cluster)
    resolved = resolve.resolve(args, lambda path: read(path).instances)
    run_dir = run_folder.choose(resolved)
    cluster = read(resolved.pod.cluster)
    is_run = not getattr(args, "dry_run", True)
    if is_run:
        datasets.download(resolved)
    size = datasets.dataset_size(resolved) if is_run else datasets.dataset_size_for_a_look(resolved)
    plan = make_plan(resolved, cluster, size, run_dir)
    if resolved.pod.ipus_per_replica > 1:
        # Needs torch, which planning does without where no model is divided.
        from raypod.model.pipeline import find_splits

        plan = make_plan(resolved, cluster, size, run_dir, find_splits(resolved))
    return plan, args


def drawn(plan: Plan) -> str:
    """The plan as a table, and below it the pipeline of a replica of several IPUs. For a process that runs nothing."""
    if plan.geometry.ipus_per_replica == 1:
        return render(plan)
    from raypod.model.pipeline_table import look_at, render_pipeline

    return f"{render(plan)}\n\n{render_pipeline(look_at(plan), plan.config.training.execution)}"


def described(plan: Plan) -> Dict[str, Any]:
    """What `drawn` shows, as plain data."""
    if plan.geometry.ipus_per_replica == 1:
        return describe(plan)
    from raypod.model.pipeline_table import describe_pipeline, look_at

    return {**describe(plan), "pipeline": describe_pipeline(look_at(plan))}


_EXTRA_HELP = {
    "--dry-run": "print the plan and touch nothing",
    "--json": "print the plan as JSON",
    "--detach": "run on without this terminal; python -m raypod status|attach|stop RUN_FOLDER",
}


def _train(argv: Sequence[str]) -> int:
    started_at_s = time.monotonic() - process_age_s()
    plan, args = plan_of(argv, "raypod.train", ["--dry-run", "--detach"])
    if args.dry_run:
        print(drawn(plan))  # noqa: T201
        return 0
    folder = Path(plan.run_dir)
    run_state.refuse_if_alive(folder)
    plan = _goes_on(plan)
    found = resume.read(plan, run_state.was_cut_off(folder)) if plan.config.run.resume else None
    run_folder.check_free(plan)
    if args.detach:
        return detached.detach(argv, folder, plan.config.run.start_timeout_s)
    run_folder.open_for(plan)
    with run_state.StateFile(folder, plan.total_updates) as state:
        return _run(plan, found, state, started_at_s)


def _goes_on(plan: Plan) -> Plan:
    """The command of a run that was cut off goes on from its newest good checkpoint; without one it starts again."""
    folder = Path(plan.run_dir)
    if plan.config.run.resume or not run_state.was_cut_off(folder):
        return plan
    if resume.newest_good(folder / "checkpoints")[0] is None:
        return plan
    run = plan.config.run.model_copy(update={"resume": str(folder)})
    return dataclasses.replace(plan, config=plan.config.model_copy(update={"run": run}))


def _run(plan: Plan, found: Optional[resume.Found], state: run_state.StateFile, started_at_s: float) -> int:
    progress = Progress(plan)
    progress.begin()
    resumed = found.checkpoint if found else None
    for damaged in found.passed_over if found else ():
        progress.warn(f"{damaged}; going on from {resumed.path.name if resumed else ''}")
    metrics = MetricsFold(plan, started_at_s)
    seen: Dict[type, Any] = {}
    known = run_folder.evaluations_until(plan, resumed.update if resumed else 0)
    evaluations = list(known)
    with contextlib.ExitStack() as stack:
        stack.callback(progress.close)
        sinks = stack.enter_context(Sinks(plan))
        events = stack.enter_context(
            contextlib.closing(coordinator.run(plan, _fleet(plan, progress), metrics, resumed, known))
        )
        for event in events:
            seen[type(event)] = event
            sinks.take(event)
            state.take(event)
            if isinstance(event, EvaluationDone):
                evaluations.append(event)
            progress.show(event)
    run_folder.write_summary(plan, metrics, seen, evaluations)
    print(f"Waiting for data: {100 * metrics.data_wait_share:.1f} % of the time of the calls")  # noqa: T201
    print(f"Everything else: {plan.run_dir}")  # noqa: T201
    return INTERRUPTED if seen[RunEnded].interrupted else 0


def _fleet(plan: Plan, progress: Progress) -> Fleet:
    # Only the chosen fleet is imported: the inline one works without Ray.
    if plan.config.run.fleet == "inline":
        from raypod.fleet.inline import InlineFleet

        return InlineFleet(plan)
    from raypod.fleet.ray import RayFleet

    return RayFleet(plan, progress.say)


if __name__ == "__main__":
    sys.exit(main())
