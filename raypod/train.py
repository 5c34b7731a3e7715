"""`raypod train`: run a training and record it in a run folder."""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before the imports below: an interrupt of them is one line, as that of `raypod train`
    from raypod.__main__ import main as run_command

    sys.exit(run_command(["train", *sys.argv[1:]]))

import atexit
import contextlib
import os
import time
from pathlib import Path
from typing import Optional, Sequence

from raypod.api import planning
from raypod.api.training import Claimed, Training, claimed, resume_point
from raypod.cli import detached
from raypod.errors import ConfigError, Preempted
from raypod.events import RunEnded
from raypod.runs import progress
from raypod.runs.progress import summary_table
from raypod.runs.upload.restore import check
from raypod.runtime.coordinator.stop import Stop, deadline_of, stop_on_signal
from raypod.system.command_line import INTERRUPTED, FlagParser, discard_unwritten, report_errors, show, tell, width_of
from raypod.system.process import process_age_s


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code.

    Returns:
        0 done, 1 failed, 2 wrong request, 130 interrupted; 130 or that of `--preemption-exit-code` preempted.
    """
    return report_errors(lambda: command(sys.argv[1:] if argv is None else argv))


def command(argv: Sequence[str]) -> int:
    """Run `raypod train`; the same, but it raises RaypodError."""
    started_at_s = time.monotonic() - process_age_s()
    stop = Stop()
    try:
        code = _train_until(stop, argv, started_at_s)
    except Preempted as preempted:
        _exit_soon(stop, preempted.exit_code)
        raise
    discard_unwritten()  # the run has ended as it has, also if its output is on a full disk
    _exit_soon(stop, code)
    return code


def parser(words: Sequence[str] = ()) -> FlagParser:
    """Return the parser of a command line."""
    switches = ["--dry-run", "--detach", "--take-over", "--quiet", "--verbose"]
    return planning.parser(words, "raypod train", switches)


def _train_until(stop: Stop, argv: Sequence[str], started_at_s: float) -> int:
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop_on_signal(stop))
        args = parser(argv).parse_args(argv)
        plan = planning.plan_of(args, lambda config: stop.configure(config.run))
        if args.quiet and args.verbose:
            raise ConfigError("--quiet and --verbose contradict each other; give one of them")
        if args.dry_run:
            plan, _ = resume_point(check(plan))
            show(planning.render_with_pipeline(plan, args.verbose))
            return 0
        is_detached = args.detach or args.detach_as is not None
        if not is_detached:
            stack.enter_context(deadline_of(stop))
        # The background process verifies its checkpoint.
        run = stack.enter_context(claimed(plan, _log, args.take_over, args.lease, verify=not is_detached))
        if is_detached:
            return detached.detach(argv, run.claim, run.plan, args.detach_as)
        detail = progress.QUIET if args.quiet else progress.VERBOSE if args.verbose else progress.NORMAL
        return _run(run, stop, started_at_s, detail)


def _run(run: Claimed, stop: Stop, started_at_s: float, detail: int) -> int:
    training = Training(run, progress.Progress(run.plan, detail=detail), stop, started_at_s)
    exit_code = 0
    for event in training.events():
        if isinstance(event, RunEnded) and event.interrupted:
            exit_code = stop.exit_code if event.preempted else INTERRUPTED
    if detail > progress.QUIET:
        tell(summary_table(run.plan, time.monotonic() - started_at_s, width_of(sys.stdout)))
    return exit_code


def _exit_soon(stop: Stop, code: int) -> None:
    """After a notice with a deadline, make the process exit without Python's finalization, which can take seconds."""

    def exit_now() -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader has closed its end
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    started = Path(sys.argv[0])
    is_own_process = "raypod" in (started.name, started.parent.name)  # else the caller of `main` determines the code
    if stop.must_leave and is_own_process:
        atexit.register(exit_now)


def _log(text: str) -> None:
    tell(f"raypod: {text}", sys.stderr)
