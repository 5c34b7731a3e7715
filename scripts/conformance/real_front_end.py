#!/usr/bin/env python3
"""Runs raypod on PopTorch's own Python front end, over a core that replays its graphs on the CPU; prints a table.

    python scripts/conformance/real_front_end.py GIT_DIR [--only TEXT] [--held-s 40] [--hang-s 60] [--show]

GIT_DIR is a clone of graphcore/poptorch, bare or not. Its folder `python/` is used unchanged; the docstring of
`front_end/__init__.py` lists what the core assumes. The script runs with the interpreter of the script, Python 3.8 with
torch 2.0.1, in a temporary folder that is removed. The columns: exit code; whether the loss falls; how far the weights
are from those of the emulated SDK after 4 updates, as a part of their length (where something fails, and after a
resume: from those of a run on the front end without a failure); how many times a device was attached; the bytes that
moved between host and device. The status is 1 if a row has a problem.

There is no row for `popdist.init` in a launched program: nothing public says what it does without mpirun. PopTorch has
no example of popdist; its tests of popdist take the place of one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import List, Optional

_SCRIPTS = Path(__file__).resolve().parents[1]
if not __package__:  # started by its path
    sys.path[:0] = [str(_SCRIPTS), str(_SCRIPTS.parent)]

import torch  # noqa: E402  # after the path is set

from conformance import front_end_runs  # noqa: E402  # as above
from conformance.clone import CloneError  # noqa: E402  # as above
from conformance.command import exit_with, refuse  # noqa: E402  # as above
from conformance.front_end_rows import ROWS, Outcome, Times  # noqa: E402  # as above

_WIDTH = max(map(len, ROWS))


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description="Run raypod on PopTorch's own front end.")
    parser.add_argument("git_dir", metavar="GIT_DIR", type=Path, help="a clone of graphcore/poptorch, bare or not")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="run the rows with TEXT in their name; repeatable"
    )
    parser.add_argument("--held-s", type=float, default=40, help="a long call or load (default: %(default)g)")
    parser.add_argument("--hang-s", type=float, default=60, help="a call that hangs (default: %(default)g)")
    parser.add_argument("--limit", type=float, default=900, metavar="SECONDS", help="of a command (%(default)g)")
    parser.add_argument("--show", action="store_true", help="print the output of rows with a problem")
    args = parser.parse_args(arguments)
    if torch.__version__.split("+")[0] != front_end_runs.TORCH:
        return refuse(f"this PopTorch needs torch {front_end_runs.TORCH}, found {torch.__version__}")
    texts = args.only or [""]
    rows = {name: row for name, row in ROWS.items() if any(text in name for text in texts)}
    if not rows:
        return refuse(f"--only {' '.join(texts)}: no such row; they are: {', '.join(ROWS)}")
    problems = 0
    with tempfile.TemporaryDirectory(prefix="front-end-") as folder:
        bench = front_end_runs.Bench(Path(folder).resolve(), args.limit)
        try:
            front_end_runs.prepare(args.git_dir, bench.folder)
        except CloneError as error:
            return refuse(str(error))
        print(f"{'':{_WIDTH}}  exit  falls  weights  attaches     bytes  problem", flush=True)
        for name, row in rows.items():
            outcome = row(bench, Times(args.held_s, args.hang_s))
            print(line(name, outcome), flush=True)
            problems += bool(outcome.problem)
            if outcome.problem and args.show:
                print(outcome.run.output)
    return 1 if problems else 0


def line(name: str, outcome: Outcome) -> str:
    """A row of the table."""
    events = outcome.run.core()
    falls = ("yes" if outcome.run.falls() else "no") if outcome.has_losses else "-"
    apart = "-" if outcome.apart is None else "equal" if outcome.apart == 0 else f"{outcome.apart:.0e}"
    attaches = sum(event["event"] == "attach" for event in events)
    moved = sum(event["bytes"] for event in events)
    return (
        f"{name:{_WIDTH}}  {outcome.run.code!s:>4}  {falls:>5}  {apart:>7}  {attaches:>8}  {moved:>8,}"
        f"  {outcome.problem or 'none'}"
    )


if __name__ == "__main__":
    exit_with(main)
