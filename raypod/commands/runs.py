"""The command lines of `raypod plan`, `verify-data`, `status`, `attach`, `stop` and `version`."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from socket import gethostname
from typing import Callable, Sequence

from raypod.cli import FlagParser, format_table, show
from raypod.errors import ConfigError
from raypod.host.folders import looked_in
from raypod.plan.urls import is_url

_SOURCE = Path("~/raypod/source")  # where the cluster files of raypod copy its source
_DESCRIPTIONS = {
    "status": "Print the state of a run.",
    "attach": "Print the output of a detached run until it ends.",
    "stop": "Stop a run after the current call, with a checkpoint.",
}


def plan(argv: Sequence[str]) -> int:
    """Print the plan of a `raypod train` command line as a table or as JSON."""
    from raypod import planning

    planned, args = planning.plan_of(argv, "raypod plan", ["--json", "--memory", "--verbose"])
    if args.json:
        show(json.dumps(planning.describe_with_pipeline(planned), indent=2))
    else:
        shows_model = args.memory or planning.needs_model(planned)  # otherwise nothing imports torch
        render = planning.render_with_pipeline if shows_model else planning.render_without_model
        show(render(planned, args.verbose))
    return 0


def verify_data(argv: Sequence[str]) -> int:
    """Verify from the ledger that each epoch used every sample exactly once; return 1 if it did not."""
    description = "Prove from the ledger of a run that each epoch used every sample exactly once."
    parser = FlagParser(prog="raypod verify-data", description=description)
    parser.add_argument("run", metavar="RUN", help="a run folder or URL")
    run = parser.parse_args(argv).run
    if is_url(run):
        from raypod.storage import snapshots

        folder = snapshots.local_folder(run, "verify-data")
    else:
        folder = _run_folder("verify-data", run)
    from raypod.record import verify_data as verification  # imports NumPy

    verdict = verification.verify(folder)
    show("\n".join(verdict.lines))
    return 0 if verdict.is_proved else 1


def status(argv: Sequence[str]) -> int:
    """Print the state of a run."""
    from raypod import detached

    return _control("status", detached.status, argv)


def attach(argv: Sequence[str]) -> int:
    """Print the output of a detached run until it ends."""
    from raypod import detached

    return _control("attach", detached.attach, argv)


def stop(argv: Sequence[str]) -> int:
    """Stop a run with a checkpoint."""
    from raypod import detached

    return _control("stop", detached.stop, argv)


def version(argv: Sequence[str]) -> int:
    """Print the versions of the packages that determine results, a line each."""
    from raypod.host.process import versions

    FlagParser(prog="raypod version", description="Print the versions of raypod and of what it uses.").parse_args(argv)
    found = dict(versions())
    found.setdefault("poptorch", "emulated")  # without the SDK, raypod's own implementation is used
    show("\n".join(format_table([*found.items()])))
    return 0


def _control(verb: str, action: Callable[[Path], int], argv: Sequence[str]) -> int:
    """Run a command on a run folder of this host, or on the head of a cluster by ssh."""
    parser = FlagParser(prog=f"raypod {verb}", description=_DESCRIPTIONS[verb])
    parser.add_argument("run", metavar="RUN_FOLDER", help="path on the host where the run was started")
    parser.add_argument("--cluster", metavar="FILE", help="run the command on the head of this cluster")
    if verb == "stop":
        parser.add_argument(
            "--preemption", action="store_true", help="announce a preemption: docs/how-to/preemption.md"
        )
    args = parser.parse_args(argv)
    is_preemption = getattr(args, "preemption", False)
    if args.cluster:
        from raypod.plan.cluster import read_cluster
        from raypod.pod import ssh

        cluster = read_cluster(args.cluster)
        head = cluster.hosts[0]
        if not ssh.is_local(head):
            words = [verb, *(["--preemption"] if is_preemption else []), args.run]
            return ssh.pass_through(head, cluster.ssh, [cluster.python, "-m", "raypod", *words])
    if is_preemption:
        from raypod import detached

        action = detached.announce_preemption
    return action(_run_folder(verb, args.run))


def _run_folder(verb: str, name: str) -> Path:
    folder = Path(name)
    if not folder.is_dir():
        place = "" if folder.is_absolute() else f"{looked_in(folder)}{_in_source(folder)}"
        raise ConfigError(f"{verb} {folder}: the run folder does not exist on {gethostname()}{place}")
    return folder


def _in_source(folder: Path) -> str:
    """Return the end of a message if a relative folder exists in that of raypod's source on the hosts of a pod.

    With `--cluster` the command runs in the home folder of the head, and trainings are started in the source folder.
    """
    with contextlib.suppress(RuntimeError):  # no home folder
        found = _SOURCE.expanduser() / folder
        return f"; did you mean {found}?" if found.is_dir() else ""
    return ""
