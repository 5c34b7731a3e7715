"""`raypod logs RUN`: the command line."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import FrozenSet, List, Optional, Sequence

from raypod.errors import ConfigError
from raypod.observe.logs.sources import Selection, logs_in, parse_since
from raypod.observe.logs.stream import Logs
from raypod.plan import layout
from raypod.plan.cluster import read_cluster
from raypod.runs import event_text
from raypod.runtime import ssh
from raypod.system.command_line import FlagParser, without_flags
from raypod.system.files import read_object
from raypod.system.urls import check_local


def run(args: Namespace) -> int:
    """Run the command.

    Returns:
        0; with --follow the exit code of the run.

    Raises:
        ConfigError: a mistake in the options, or the folder is not that of a run or a launch.
        RunError: with --follow, the coordinator of the run died.
        BrokenPipeError: the reader of stdout is gone.
    """
    if args.cluster:
        cluster = read_cluster(args.cluster)
        if not ssh.is_local(cluster.hosts[0]):
            words = [cluster.python, "-m", "raypod", "logs", *without_flags(args.argv, "--cluster")]
            return ssh.pass_through(cluster.hosts[0], cluster.ssh, words)
    check_local(args.run, "logs")
    folder = _checked(Path(args.run))
    instances = _instances(folder, args.instance)
    kinds = _kinds(args.events or ("main" if instances is None else "none"))
    since_s = parse_since(args.since) if args.since is not None else None
    selection = Selection(instances, kinds, since_s, _tail(args.tail))
    with Logs(folder, selection) as logs:
        return logs.show(args.follow)


def parser() -> FlagParser:
    """Return the parser of the command."""
    parser = FlagParser(
        run, prog="raypod logs", description="Print the output of all instances and the events of a run."
    )
    parser.add_argument("run", metavar="RUN_FOLDER", help="of a training or a launch, on the host where it was started")
    parser.add_argument(
        "--instance",
        metavar="K",
        action="append",
        default=[],
        help="only the output of these instances, as in 3 or 0,2-5; can be repeated",
    )
    parser.add_argument(
        "--events",
        metavar="KINDS",
        help="the events to print: main, all, none, or a list of kinds (default: main; none with --instance)",
    )
    parser.add_argument(
        "--since", metavar="TIME", help="an age (10m, 2h), a time (2026-01-31T08:00), or seconds since 1970"
    )
    parser.add_argument("--tail", metavar="N", help="only the last N lines of each source")
    parser.add_argument(
        "--follow", "-f", action="store_true", help="print new lines until the run ends; return its exit code"
    )
    parser.add_argument("--cluster", metavar="FILE", help="run the command on the head of this cluster")
    return parser


def _checked(folder: Path) -> Path:
    if not folder.is_dir():
        place = "" if folder.is_absolute() else f" in {Path.cwd()}"  # with --cluster the home folder of the head
        raise ConfigError(f"logs {folder}: the run folder does not exist{place}")
    if not layout.is_run_folder(folder, launches=True):
        raise ConfigError(f"logs {folder}: not the folder of a run or a launch: it has no {layout.PLAN}")
    return folder.absolute()


def _kinds(text: str) -> FrozenSet[str]:
    """Return the kinds of events that --events names."""
    named = {"none": frozenset(), "main": event_text.MAIN, "all": event_text.ALL}
    kinds = named.get(text, frozenset(each.strip() for each in text.split(",")))
    unknown = sorted(kinds - event_text.ALL)
    if unknown:
        known = ", ".join(sorted(event_text.ALL))
        raise ConfigError(f"--events {text}: {unknown[0]!r} is no kind of event; known: none, main, all, {known}")
    return kinds


def _instances(folder: Path, texts: Sequence[str]) -> Optional[FrozenSet[int]]:
    """Return the instances that --instance names; None for all."""
    if not texts:
        return None
    named = {index for text in texts for part in text.split(",") for index in _range(text, part.strip())}
    planned = read_object(folder / layout.PLAN).get("instances")
    if planned:
        known = set(range(len(planned)))
    else:
        logs = logs_in(folder, Selection(None, frozenset()))
        known = {int(label.split()[1]) for label in logs if label.startswith("instance ")}
    unknown = sorted(named - known)
    if unknown:
        names = ", ".join(map(str, sorted(known))) or "none"
        raise ConfigError(f"--instance {unknown[0]}: the run has the instances {names}")
    return frozenset(named)


def _range(text: str, part: str) -> List[int]:
    """Return the numbers of `3` or `2-5`."""
    first, dash, last = part.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
        raise ConfigError(f"--instance {text}: must be numbers or ranges of instances, as in 0,2-5")
    if dash and int(last) - int(first) > 1 << 16:
        raise ConfigError(f"--instance {text}: too many instances")
    return list(range(int(first), int(last or first) + 1))


def _tail(text: Optional[str]) -> Optional[int]:
    if text is None:
        return None
    if not text.isdecimal():
        raise ConfigError(f"--tail {text}: must be a number of lines")
    return int(text)
