"""`python -m raypod.train`: run a training and record it in a run folder."""

from __future__ import annotations

import sys
import time
from typing import Optional, Sequence

from raypod import detached, planning
from raypod.api.training import Claimed, Training, claimed, resume_point
from raypod.cli import INTERRUPTED, report_errors
from raypod.coordinator.stop import Stop
from raypod.events import RunEnded
from raypod.host.process import process_age_s
from raypod.record.progress import Progress


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code: 0 done, 1 failed, 2 wrong request, 130 interrupted."""
    return report_errors(lambda: _train(sys.argv[1:] if argv is None else argv, "raypod.train"))


def command(argv: Sequence[str]) -> int:
    """Run `raypod train`; the same, but it raises RaypodError."""
    return _train(argv, "raypod train")


def _train(argv: Sequence[str], prog: str) -> int:
    started_at_s = time.monotonic() - process_age_s()
    plan, args = planning.plan_of(argv, prog, ["--dry-run", "--detach", "--take-over"])
    if args.dry_run:
        plan, _ = resume_point(plan)
        print(planning.render_with_pipeline(plan))  # noqa: T201
        return 0
    # The background process verifies its checkpoint.
    with claimed(plan, _log, args.take_over, args.lease, verify=not args.detach) as run:
        if args.detach:
            return detached.detach(argv, run.claim, plan.config.run.start_timeout_s)
        return _run(run, started_at_s)


def _run(run: Claimed, started_at_s: float) -> int:
    training = Training(run, Progress(run.plan), Stop(), started_at_s)
    was_interrupted = False
    for event in training.events():
        if isinstance(event, RunEnded):
            was_interrupted = event.interrupted
    print(f"Waiting for data: {100 * training.metrics.data_wait_share:.1f} % of the time of the calls")  # noqa: T201
    print(f"Everything else: {run.plan.run_dir}")  # noqa: T201
    return INTERRUPTED if was_interrupted else 0


def _log(text: str) -> None:
    print(f"raypod: {text}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
