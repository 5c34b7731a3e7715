"""`python -m raypod.train`: run a training and record it in a run folder."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Tuple

from raypod import detached, planning
from raypod.checkpoint import resume
from raypod.cli import INTERRUPTED, report_errors
from raypod.coordinator import coordinator
from raypod.events import EvaluationDone, RunEnded, RunStarted
from raypod.fleet.choice import fleet_for
from raypod.host.process import process_age_s
from raypod.plan.plan import Plan
from raypod.record import claim, run_folder, run_state
from raypod.record.metrics import MetricsAggregator
from raypod.record.progress import Progress
from raypod.record.sinks import Sinks


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code: 0 done, 1 failed, 2 wrong request, 130 interrupted."""
    return report_errors(lambda: _train(sys.argv[1:] if argv is None else argv))


def _train(argv: Sequence[str]) -> int:
    started_at_s = time.monotonic() - process_age_s()
    plan, args = planning.plan_of(argv, "raypod.train", ["--dry-run", "--detach", "--take-over"])
    if args.dry_run:
        plan, _ = _resume_point(plan)
        print(planning.render_with_pipeline(plan))  # noqa: T201
        return 0
    planning.check_host(plan)
    with _claim(plan, args) as claimed:
        plan = dataclasses.replace(plan, run_dir=str(claimed.folder))
        plan, found = _resume_point(plan, verify=not args.detach)  # the background process verifies its checkpoint
        if args.detach:
            return detached.detach(argv, claimed, plan.config.run.start_timeout_s)
        run_folder.create(plan)
        with run_state.StateFile(claimed.folder, plan.total_updates) as state:
            return _run(plan, found, state, claimed, started_at_s)


def _claim(plan: Plan, args: argparse.Namespace) -> claim.Claim:
    if args.lease is not None:
        return claim.adopt(plan.run_dir, args.lease, _log)
    return claim.claim(plan.config, plan.run_dir, args.take_over, _log)


def _resume_point(plan: Plan, verify: bool = True) -> Tuple[Plan, Optional[resume.ResumePoint]]:
    """Return the plan, changed to resume an interrupted run in its folder, and the checkpoint from which it resumes.

    Raises:
        ConfigError: the run cannot resume, or its folder holds something else.
    """
    was_cut_off, found = run_state.is_unfinished(Path(plan.run_dir)), None
    if plan.config.run.resume:
        found = resume.find_checkpoint(plan, was_cut_off, verify)
    elif was_cut_off:
        plan, found = resume.resume_interrupted(plan, verify)
    run_folder.check_may_write(plan)
    return plan, found


def _run(
    plan: Plan,
    found: Optional[resume.ResumePoint],
    state: run_state.StateFile,
    claimed: claim.Claim,
    started_at_s: float,
) -> int:
    progress = Progress(plan)
    progress.begin()
    resumed = found.checkpoint if found else None
    for damaged in found.damaged if found else ():
        progress.warn(f"{damaged}; resuming from {resumed.path.name if resumed else ''}")
    metrics = MetricsAggregator(plan, started_at_s)
    last_events: Dict[type, Any] = {}
    known = run_folder.evaluations_until(plan, resumed.update if resumed else 0)
    evaluations = list(known)
    with contextlib.ExitStack() as stack:
        stack.callback(progress.close)
        sinks = stack.enter_context(Sinks(plan))
        events = stack.enter_context(
            contextlib.closing(coordinator.run(plan, fleet_for(plan, progress.print_line), metrics, resumed, known))
        )
        stack.enter_context(claimed.lease.interrupting())
        for event in events:
            claimed.lease.check()
            if isinstance(event, RunStarted):
                claimed.keep()
            last_events[type(event)] = event
            sinks.handle(event)
            state.handle(event)
            if isinstance(event, EvaluationDone):
                evaluations.append(event)
            progress.show(event)
    run_folder.write_summary(plan, metrics, last_events, evaluations)
    print(f"Waiting for data: {100 * metrics.data_wait_share:.1f} % of the time of the calls")  # noqa: T201
    print(f"Everything else: {plan.run_dir}")  # noqa: T201
    return INTERRUPTED if last_events[RunEnded].interrupted else 0


def _log(text: str) -> None:
    print(f"raypod: {text}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
