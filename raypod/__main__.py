"""`python -m raypod COMMAND`: plan and control runs, and manage the cluster.

Every command imports what it needs when it runs, so that the light ones start fast.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Callable, Dict, Optional, Sequence

from raypod.cli import FlagParser, report_errors
from raypod.errors import ConfigError


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    return report_errors(lambda: _dispatch(words))


def _dispatch(words: Sequence[str]) -> int:
    usage = f"usage: python -m raypod {{{','.join(COMMANDS)}}} [flags]; `python -m raypod.train` runs a training"
    if not words or words[0] in ("-h", "--help"):
        print(usage)  # noqa: T201 - the command line's own output
        return 0 if words else 2
    if words[0] not in COMMANDS:
        raise ConfigError(f"unknown command {words[0]!r}; {usage}")
    return COMMANDS[words[0]](words[1:])


def _plan(argv: Sequence[str]) -> int:
    """Print the plan of a `raypod.train` command line as a table or as JSON."""
    from raypod import planning

    plan, args = planning.plan_of(argv, "raypod plan", ["--json"])
    if args.json:
        print(json.dumps(planning.describe_with_pipeline(plan), indent=2))  # noqa: T201
    else:
        print(planning.render_with_pipeline(plan))  # noqa: T201
    return 0


def _verify_data(argv: Sequence[str]) -> int:
    """Verify from the ledger that each epoch used every sample exactly once; return 1 if it did not."""
    from raypod.record import verify_data

    verdict = verify_data.verify(_run_folder("verify-data", argv))
    print("\n".join(verdict.lines))  # noqa: T201
    return 0 if verdict.is_proved else 1


def _status(argv: Sequence[str]) -> int:
    """Print the state of a run."""
    from raypod import detached

    return _control("status", detached.status, argv)


def _attach(argv: Sequence[str]) -> int:
    """Print the output of a detached run until it ends."""
    from raypod import detached

    return _control("attach", detached.attach, argv)


def _stop(argv: Sequence[str]) -> int:
    """Stop a run with a checkpoint."""
    from raypod import detached

    return _control("stop", detached.stop, argv)


def _control(verb: str, action: Callable[[Path], int], argv: Sequence[str]) -> int:
    """Run a command on a run folder of this host, or on the head of a cluster by ssh."""
    parser = FlagParser(prog=f"raypod {verb}", description=_DESCRIPTIONS[verb])
    parser.add_argument("run", metavar="RUN_FOLDER", help="path on the host where the run was started")
    parser.add_argument("--cluster", metavar="FILE", help="run the command on the head of this cluster")
    if verb == "stop":
        parser.add_argument(
            "--preemption", action="store_true", help="the machine is taken away: see docs/preemption.md"
        )
    args = parser.parse_args(argv)
    is_preemption = getattr(args, "preemption", False)
    if args.cluster:
        from raypod.plan.cluster import read_cluster
        from raypod.pod import ssh

        cluster = read_cluster(args.cluster)
        head = cluster.hosts[0]
        words = [verb, *(["--preemption"] if is_preemption else []), args.run]
        if not ssh.is_local(head):
            return ssh.pass_through(head, cluster.ssh, [cluster.python, "-m", "raypod", *words])
    if is_preemption:
        from raypod import detached

        action = detached.announce_preemption
    return action(_run_folder(verb, [args.run]))


def _command(module: str, function: str) -> Callable[[Sequence[str]], int]:
    """Return the command of a module, which is imported when it runs."""

    def run(argv: Sequence[str]) -> int:
        command: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
        return command(argv)

    return run


_DESCRIPTIONS = {
    "status": "Print the state of a run.",
    "attach": "Print the output of a detached run until it ends.",
    "stop": "Stop a run after the current call, with a checkpoint.",
}


def _run_folder(verb: str, argv: Sequence[str]) -> Path:
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ConfigError(f"usage: python -m raypod {verb} RUN_FOLDER")
    folder = Path(argv[0])
    if not folder.is_dir():
        raise ConfigError(f"{verb} {folder}: the run folder does not exist")
    return folder


COMMANDS: Dict[str, Callable[[Sequence[str]], int]] = {
    "plan": _plan,
    "verify-data": _verify_data,
    "status": _status,
    "attach": _attach,
    "stop": _stop,
    "monitor": _command("raypod.monitor.command", "main"),
    "logs": _command("raypod.logs.command", "main"),
    "report": _command("raypod.report.command", "report"),
    "dashboard": _command("raypod.dashboard.command", "main"),
    **{verb: _command("raypod.trained.commands", verb) for verb in ("evaluate", "export", "average", "predict")},
    "doctor": _command("raypod.pod.doctor", "doctor"),
    "cluster-file": _command("raypod.fleet.ray_cluster_file", "write_cluster_file"),
    "up": _command("raypod.pod.up", "up"),
    "down": _command("raypod.pod.up", "down"),
}

if __name__ == "__main__":
    sys.exit(main())
