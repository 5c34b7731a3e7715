#!/usr/bin/env python3
"""Runs PopTorch's own tests, taken from a clone of its repository, against the emulated SDK.

    python scripts/poptorch_conformance.py GIT_DIR [--horovod-git DIR] [--only half_float_test] [-k KEYWORD] [--show]

The tests run with the interpreter of this script, in a temporary folder that is deleted. Tests that use the C++ backend
are excluded. The status is 1 if a test fails that conformance/*_expected.yaml does not list, if a listed one passes, if
no test is selected, or if all tests run and less than 99 % of the semantic ones pass or more than 15 % are excluded.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from pathlib import Path
from typing import Callable, List, Optional

from conformance import custom_operators, expected, horovod, runs, tables
from conformance.clone import CloneError
from conformance.command import exit_with, refuse
from conformance.outcomes import FAILED, RunOptions, Suite

LISTS = Path(__file__).resolve().parent / "conformance"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Run PopTorch's and Horovod's tests against the emulated SDK.")
    parser.add_argument(
        "git_dir", metavar="GIT_DIR", nargs="?", type=Path, help="a clone of graphcore/poptorch, bare or not"
    )
    parser.add_argument(
        "--horovod-git", metavar="DIR", type=Path, help="a clone of horovod/horovod: run its PyTorch tests"
    )
    parser.add_argument(
        "--addons-git", metavar="DIR", type=Path, help="a clone of poptorch-experimental-addons: run its tests"
    )
    parser.add_argument(
        "--bess-git", metavar="DIR", type=Path, help="a clone of bess-kge: run its tests; needs --addons-git"
    )
    parser.add_argument("-j", "--jobs", type=int, default=2, help="files that run at once (default: %(default)s)")
    parser.add_argument(
        "--limit", type=float, default=1800, metavar="SECONDS", help="time for one file (default: %(default)g)"
    )
    parser.add_argument("--only", default="", metavar="NAME", help="run the files with NAME in their name")
    parser.add_argument("-k", dest="keyword", default="", help="run the tests that match, as pytest -k")
    parser.add_argument("--show", action="store_true", help="print the traceback of every failure")
    return parser


def main(arguments: Optional[List[str]] = None) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    if not any((args.git_dir, args.horovod_git, args.addons_git)):
        return refuse("give GIT_DIR, a clone of graphcore/poptorch, --horovod-git DIR or --addons-git DIR")
    if args.bess_git is not None and args.addons_git is None:
        return refuse("--bess-git needs --addons-git DIR, a clone of poptorch-experimental-addons")
    if args.jobs < 1 or args.limit <= 0:
        return refuse("--jobs and --limit are positive")
    options = RunOptions(args.jobs, args.limit, args.only, args.keyword)
    verdicts = []
    try:
        if args.git_dir is not None:
            verdicts.append(_judged("PopTorch", runs.run, args.git_dir, options, show=args.show))
        if args.horovod_git is not None:
            verdicts.append(_judged("Horovod", horovod.run, args.horovod_git, options, show=args.show))
        if args.addons_git is not None:
            verdicts.append(_judged("Addons", custom_operators.run_addons, args.addons_git, options, show=args.show))
        if args.bess_git is not None:
            run_bess = functools.partial(custom_operators.run_bess, args.addons_git)
            verdicts.append(_judged("Bess", run_bess, args.bess_git, options, show=args.show))
    except (CloneError, expected.ListError) as error:
        return refuse(str(error))
    if not any(verdict.counts for verdict in verdicts):
        print("no test was selected")
        return 1
    return 0 if all(verdict.good for verdict in verdicts) else 1


def _judged(
    title: str, run: Callable[[Path, Path, RunOptions], Suite], git_dir: Path, options: RunOptions, *, show: bool
) -> expected.Verdict:
    """Runs a suite and prints its report."""
    entries = expected.read_list(LISTS / f"{title.lower()}_expected.yaml")
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        suite = run(git_dir, Path(folder).resolve(), options)
    verdict = expected.judge(suite, entries, whole=options.whole)
    if show:
        for file, outcomes in sorted(suite.items()):
            for outcome in outcomes:
                if outcome.result == FAILED:
                    print(f"=== {file}::{outcome.test}\n{outcome.reason}")
    for line in tables.report(title, suite, verdict):
        print(line)
    return verdict


if __name__ == "__main__":
    exit_with(main)
