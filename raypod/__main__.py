"""`python -m raypod VERB`: what can be asked about a run besides running it, and what a cluster needs before."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Callable, Dict, Optional, Sequence

from raypod import detached, planning
from raypod.cli import FlagParser, report_errors
from raypod.errors import ConfigError
from raypod.plan.cluster import read_cluster
from raypod.pod import ssh, up
from raypod.pod.doctor import doctor


def main(argv: Optional[Sequence[str]] = None) -> int:
    """The command; returns its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    return report_errors(lambda: _dispatch(words))


def _dispatch(words: Sequence[str]) -> int:
    usage = f"usage: python -m raypod {{{','.join(VERBS)}}} [flags]; `python -m raypod.train` trains"
    if not words or words[0] in ("-h", "--help"):
        print(usage)  # noqa: T201 - the command line's own output
        return 0 if words else 2
    if words[0] not in VERBS:
        raise ConfigError(f"unknown verb {words[0]!r}; {usage}")
    return VERBS[words[0]](words[1:])


def _plan(argv: Sequence[str]) -> int:
    """Print the plan of a command line of `raypod.train`: as a table, or as JSON."""
    plan, args = planning.plan_of(argv, "raypod plan", ["--json"])
    print(json.dumps(planning.describe(plan), indent=2) if args.json else planning.render(plan))  # noqa: T201
    return 0


def _verify_data(argv: Sequence[str]) -> int:
    """Whether each epoch of a run saw each sample exactly once."""
    from raypod.record import verify_data

    verdict = verify_data.verify(_run_folder("verify-data", argv))
    print("\n".join(verdict.lines))  # noqa: T201
    return 0 if verdict.is_proved else 1


def _status(argv: Sequence[str]) -> int:
    """How far a run is."""
    return _ask_run("status", detached.status, argv)


def _attach(argv: Sequence[str]) -> int:
    """Show the output of a detached run until it ends."""
    return _ask_run("attach", detached.attach, argv)


def _stop(argv: Sequence[str]) -> int:
    """End a run after a checkpoint."""
    return _ask_run("stop", detached.stop, argv)


def _ask_run(verb: str, ask: Callable[[Path], int], argv: Sequence[str]) -> int:
    """Ask a run in a folder of this host, or of the head of a cluster."""
    parser = FlagParser(prog=f"raypod {verb}", description=f"{verb} of a run, by its folder.")
    parser.add_argument("run", metavar="RUN_FOLDER", help="as the host knows it on which the run was started")
    parser.add_argument("--cluster", metavar="FILE", help="the run was started on the head of this cluster: ask there")
    args = parser.parse_args(argv)
    if args.cluster:
        cluster = read_cluster(args.cluster)
        head = cluster.hosts[0]
        if not ssh.is_local(head):
            return ssh.pass_through(head, cluster.ssh, [cluster.python, "-m", "raypod", verb, args.run])
    return ask(_run_folder(verb, [args.run]))


def _run_folder(verb: str, argv: Sequence[str]) -> Path:
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ConfigError(f"usage: python -m raypod {verb} RUN_FOLDER")
    folder = Path(argv[0])
    if not folder.is_dir():
        raise ConfigError(f"{verb} {folder}: there is no such run folder")
    return folder


VERBS: Dict[str, Callable[[Sequence[str]], int]] = {
    "plan": _plan,
    "verify-data": _verify_data,
    "status": _status,
    "attach": _attach,
    "stop": _stop,
    "doctor": doctor,
    "up": up.up,
    "down": up.down,
}

if __name__ == "__main__":
    sys.exit(main())
