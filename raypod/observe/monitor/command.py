"""The command `raypod monitor`: parse its flags, and show the pod live, once as text, or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Optional, TextIO

from rich.console import Console

from raypod.errors import ConfigError
from raypod.observe.monitor import live
from raypod.observe.monitor.live import is_live
from raypod.observe.monitor.model import POD, RUN, Screen, to_json
from raypod.observe.monitor.pod_source import PodSource
from raypod.observe.monitor.views import plain
from raypod.plan.cluster import read_cluster
from raypod.plan.layout import is_run_folder
from raypod.system.command_line import FlagParser, show
from raypod.system.files import strict_json
from raypod.system.urls import check_local

_LEAST_S, _MOST_S = 0.1, 60.0
_LOAD_S = 0.55  # the load of a host is measured over this time at least
_USAGE = "%(prog)s [-h] [--cluster FILE] [--once | --json [--follow]] [--interval S] [RUN]"
_DESCRIPTION = """\
Show which IPUs of the pod work for whom, and how runs are doing. Without RUN: all runs of this user on this host (of
all users for root). In the terminal, h lists the keys."""


def run(args: argparse.Namespace) -> int:
    """Run the command. Exit codes: 0; 2 for a folder that is no run or wrong flags; 130 after Ctrl-C."""
    _check(args)
    folder = _folder(args.run) if args.run is not None else None
    cluster = read_cluster(args.cluster) if args.cluster is not None else None
    source = PodSource(args.interval, folder, cluster)
    if args.json:
        return _json(source, folder, args.interval if args.follow else None)
    screen = Screen(POD if folder is None else RUN, str(folder) if folder is not None else None)
    is_ascii = _is_ascii(sys.stdout)
    if args.once or not is_live():
        return _once(source, screen, is_ascii)
    return live.show(source, screen, args.interval, Console(highlight=False, markup=False, emoji=False), is_ascii)


def parser() -> FlagParser:
    """Return the parser of the command."""
    parser = FlagParser(run, prog="raypod monitor", usage=_USAGE, description=_DESCRIPTION)
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run folder; default: all runs on this host")
    parser.add_argument("--cluster", metavar="FILE", help="show all hosts of this cluster file, by ssh")
    parser.add_argument("--once", action="store_true", help="print plain text once")
    parser.add_argument("--json", action="store_true", help="print JSON once, in one line")
    parser.add_argument("--follow", action="store_true", help="with --json: a line per interval until it is stopped")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between updates [1]")
    return parser


def _check(args: argparse.Namespace) -> None:
    if args.run is not None and args.cluster is not None:
        raise ConfigError("monitor: RUN and --cluster exclude each other; left and right select a run of the cluster")
    if args.follow and not args.json:
        raise ConfigError("--follow needs --json; without both the monitor is live in the terminal")
    if args.once and args.json:
        raise ConfigError("--once prints text and --json prints JSON; use one of them")
    if not _LEAST_S <= args.interval <= _MOST_S:
        raise ConfigError(f"--interval {args.interval:g}: must be from {_LEAST_S:g} to {_MOST_S:g} seconds")


def _folder(text: str) -> Path:
    check_local(text, "monitor")
    folder = Path(text)
    if not folder.is_dir():
        raise ConfigError(f"monitor {text}: the run folder does not exist")
    if not is_run_folder(folder, launches=True):
        raise ConfigError(f"monitor {text}: the folder holds no run (no state.json, launch.json or metrics.jsonl)")
    return folder.resolve()


def _json(source: PodSource, folder: Optional[Path], interval_s: Optional[float]) -> int:
    """Print JSON once, or every `interval_s` seconds until the reader closes the pipe; of the runs only a named one."""
    with source:
        source.wait()
        source.poll()
        time.sleep(_LOAD_S)  # before the first line, too: another monitor may read only that one
        try:
            while True:
                began_s = time.monotonic()
                pod = source.poll()
                if folder is not None:
                    pod = dataclasses.replace(pod, runs=tuple(run for run in pod.runs if run.run_dir == str(folder)))
                show(strict_json(to_json(pod, source.facts)))
                if interval_s is None:
                    return 0
                time.sleep(max(0.0, interval_s - (time.monotonic() - began_s)))
        except BrokenPipeError:
            return _closed_pipe()


def _once(source: PodSource, screen: Screen, ascii_only: bool) -> int:
    """Print the view in full, without colours unless the output is a terminal."""
    with source:
        source.wait()
        source.poll()
        time.sleep(_LOAD_S)
        pod = source.poll()
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    try:
        for line in plain(pod, screen, console.width, ascii_only):
            line.rstrip()
            console.print(line, soft_wrap=True)
    except BrokenPipeError:
        return _closed_pipe()
    return 0


def _closed_pipe() -> int:
    """End quietly: point stdout at nothing, so that the interpreter does not fail when it flushes it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _is_ascii(output: TextIO) -> bool:
    """Return whether the output cannot show the block characters."""
    try:
        "▁█·…━↑".encode(output.encoding or "ascii")
    except (UnicodeError, LookupError):
        return True
    return False
