"""`raypod report RUN [RUN ...]`, and the report that a run writes at its end."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Dict, List, Sequence

from raypod.errors import ConfigError
from raypod.observe.report.page import render_bounded
from raypod.observe.report.run_data import RunReader
from raypod.plan.layout import REPORT
from raypod.runs.upload import remote_run
from raypod.system.command_line import FlagParser, show
from raypod.system.files import replace_file


def parser() -> FlagParser:
    """Return the parser of the command."""
    parser = FlagParser(
        run, prog="raypod report", description="Write one HTML page that shows runs, also unfinished ones."
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run folder or URL; several are drawn over each other")
    default = f"RUN/{REPORT} for one run, {REPORT} in the current folder for several or a URL"
    parser.add_argument("--output", metavar="FILE", help=f"the file [{default}]")
    return parser


def run(args: Namespace) -> int:
    """Write the report of one or more runs, and print its path."""
    readers = read_runs(args.runs, observe=True)
    is_copy = remote_run.is_copy(readers[0].folder)
    target = readers[0].folder / REPORT if len(readers) == 1 and not is_copy else Path(REPORT)
    if args.output == "":
        raise ConfigError("--output is empty; name a file")
    output = Path(args.output) if args.output is not None else target
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder; name a file in it, as {output / REPORT}")
    try:
        size = _write(readers, output)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}") from None
    show(f"Report: {output} ({size / 1e6:.1f} MB)")
    return 0


def write_report(folder: Path) -> float:
    """Write `report.html` into a run folder; return how many seconds that took.

    Raises:
        ConfigError: a file of the run cannot be read.
        OSError: the report cannot be written.
    """
    began_s = time.monotonic()
    _write(read_runs([str(folder)]), folder / REPORT)
    return time.monotonic() - began_s


def read_runs(folders: Sequence[str], setting: str = "report", observe: bool = False) -> List[RunReader]:
    """Return the readers of run folders, each folder once, after the first read.

    Args:
        folders: paths or URLs.
        setting: for messages.
        observe: wait until it is known whether the coordinators on other hosts live.
    """
    readers: Dict[Path, RunReader] = {}
    for name in folders:
        reader = RunReader(remote_run.local_folder(name, setting))
        readers.setdefault(reader.folder, reader)
    for reader in readers.values():
        if observe:
            reader.observe(lambda text: show(text, sys.stderr))
        reader.refresh()
    return list(readers.values())


def _write(readers: Sequence[RunReader], output: Path) -> int:
    """Write the page of the runs; return its size in bytes."""
    title = f"{readers[0].folder.name} - raypod report" if len(readers) == 1 else f"{len(readers)} runs - raypod report"
    content = render_bounded([reader.data for reader in readers], title).encode()
    replace_file(output, content)
    return len(content)
