"""The command lines of `raypod plan`, `verify-data`, `status`, `attach`, `stop`, `files` and `version`."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import List, Sequence

from raypod.errors import ConfigError
from raypod.plan import layout, shipped
from raypod.system.command_line import FlagParser, format_table, show, suggestion, width_of, without_flags
from raypod.system.files import looked_in
from raypod.system.urls import check_local, is_url

_SOURCE = Path("~/raypod/source")  # where the cluster files of raypod copy its source


def plan_parser(words: Sequence[str]) -> FlagParser:
    from raypod.api import planning

    return planning.parser(words, "raypod plan", ["--json", "--memory", "--verbose"], _plan)


def _plan(args: Namespace) -> int:
    """Print the plan of a `raypod train` command line as a table or as JSON."""
    from raypod.api import planning

    planned = planning.plan_of(args)
    if args.json:
        show(json.dumps(planning.describe_with_pipeline(planned), indent=2))
    else:
        shows_model = args.memory or planning.needs_model(planned)  # otherwise nothing imports torch
        render = planning.render_with_pipeline if shows_model else planning.render_without_model
        show(render(planned, args.verbose))
    return 0


def verify_data_parser() -> FlagParser:
    description = "Prove from the ledger of a run that each epoch used every sample exactly once."
    parser = FlagParser(_verify_data, prog="raypod verify-data", description=description)
    parser.add_argument("run", metavar="RUN", help="a run folder or URL")
    return parser


def _verify_data(args: Namespace) -> int:
    """Verify from the ledger that each epoch used every sample exactly once; return 1 if it did not."""
    if is_url(args.run):
        from raypod.runs.upload import remote_run

        folder = remote_run.local_folder(args.run, "verify-data")
    else:
        folder = _run_folder("verify-data", args.run)
    from raypod.runs import verify_data as verification  # imports NumPy

    verdict = verification.verify(folder)
    show("\n".join(verdict.lines))
    return 0 if verdict.is_proved else 1


def stop_parser() -> FlagParser:
    parser = _parser("stop", "Stop a run after the current call, with a checkpoint.")
    parser.add_argument("--preemption", action="store_true", help="announce a preemption: docs/how-to/preemption.md")
    return parser


def _version(args: Namespace) -> int:
    """Print the versions of the packages that determine results, a line each."""
    from raypod.system.process import versions

    found = dict(versions())
    found.setdefault("poptorch", "emulated")  # without the SDK, raypod's own implementation is used
    show("\n".join(format_table([*found.items()])))
    return 0


def _parser(verb: str, description: str) -> FlagParser:
    parser = FlagParser(lambda args: _control(verb, args), prog=f"raypod {verb}", description=description)
    parser.add_argument("run", metavar="RUN_FOLDER", help="path on the host where the run was started")
    parser.add_argument("--cluster", metavar="FILE", help="run the command on the head of this cluster")
    return parser


def _control(verb: str, args: Namespace) -> int:
    """Run a command on a run folder of this host, or on the head of a cluster by ssh."""
    if args.cluster:
        from raypod.plan.cluster import read_cluster
        from raypod.runtime import ssh

        cluster = read_cluster(args.cluster)
        head = cluster.hosts[0]
        if not ssh.is_local(head):
            words = [cluster.python, "-m", "raypod", verb, *without_flags(args.argv, "--cluster")]
            return ssh.pass_through(head, cluster.ssh, words)
    from raypod.cli import detached

    actions = {"status": detached.status, "attach": detached.attach, "stop": detached.stop}
    folder = _run_folder(verb, args.run)
    if getattr(args, "preemption", False):
        return detached.stop(folder, number=signal.SIGUSR1)
    return actions[verb](folder)


def _run_folder(verb: str, name: str) -> Path:
    check_local(name, verb)
    folder = Path(name)
    if folder.is_file():
        near = next((each for each in folder.resolve().parents if layout.is_run_folder(each)), None)
        way = f"name the run folder: raypod {verb} {near}" if near else "name a run folder, as in runs/NAME"
        raise ConfigError(f"{verb} {folder}: this is a file; {way}")
    if not folder.is_dir():
        place = "" if folder.is_absolute() else f"{looked_in(folder)}{_in_source(folder)}"
        raise ConfigError(f"{verb} {folder}: the run folder does not exist on {socket.gethostname()}{place}")
    return folder


def _in_source(folder: Path) -> str:
    """Return the end of a message if a relative folder exists in that of raypod's source on the hosts of a pod.

    With `--cluster` the command runs in the home folder of the head, and trainings are started in the source folder.
    """
    with contextlib.suppress(RuntimeError):  # no home folder
        found = _SOURCE.expanduser() / folder
        return f"; did you mean {found}?" if found.is_dir() else ""
    return ""


status_parser = partial(_parser, "status", "Print the state of a run.")
attach_parser = partial(_parser, "attach", "Print the output of a detached run until it ends.")
_VERSIONS = "Print the versions of raypod and of what it uses."
version_parser = partial(FlagParser, _version, prog="raypod version", description=_VERSIONS)


_TITLES = {shipped.RECIPES: "Recipes, for raypod train --config", shipped.CLUSTERS: "Cluster files, for --cluster"}


def files_parser() -> FlagParser:
    description = "List the recipes and cluster files that raypod contains, or print one of them."
    parser = FlagParser(_files, prog="raypod files", description=description)
    parser.add_argument("name", metavar="NAME", nargs="?", help="print this file, as in: raypod files pod64.yaml")
    return parser


def _files(args: Namespace) -> int:
    """List the files, or print one. ConfigError for an unknown name."""
    name = args.name
    if name is None:
        show("\n\n".join(_listed(kind) for kind in _TITLES))
        return 0
    for kind in _TITLES:
        for file in (name, f"{name}.yaml"):
            if file in shipped.names(kind):
                sys.stdout.write((shipped.folder(kind) / file).read_text(encoding="utf-8"))
                return 0
    known = [each for kind in _TITLES for each in shipped.names(kind)]
    raise ConfigError(f"files {name}: raypod contains no such file{suggestion(name, known)}")


def _listed(kind: str) -> str:
    names = shipped.names(kind)
    width = width_of(sys.stdout)
    rows: List[List[str]] = [[f"  {name}", _summary(shipped.folder(kind) / name)] for name in names]
    return "\n".join([f"{_TITLES[kind]}:", *format_table(rows, width=width)]) if rows else f"{_TITLES[kind]}: none"


def _summary(file: Path) -> str:
    """Return the beginning of a file's first comment."""
    return file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ").split(". ")[0].rstrip(".")
