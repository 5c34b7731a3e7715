"""`raypod compare RUN RUN...`: the settings that differ, and the best and last value of each metric."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from typing import Any, Dict, List, Optional, Sequence

from raypod.errors import ConfigError
from raypod.observe.report.command import read_runs
from raypod.observe.report.run_data import differing_settings
from raypod.system.command_line import FlagParser, format_table, show, width_of

_NOTHING = "-"
_GAP = 2  # columns between those of a table
_MOST_WITHOUT_PLOT = 5  # runs; as in parallel.js


def parser() -> FlagParser:
    """Return the parser of the command."""
    parser = FlagParser(
        run,
        prog="raypod compare",
        description="Print a table of the settings that differ between runs, and of the best and last values of "
        "their metrics.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run folder or URL")
    return parser


def run(args: Namespace) -> int:
    """Print the comparison of several runs."""
    runs = [reader.data() for reader in read_runs(args.runs, "compare")]
    if len(runs) < 2:
        raise ConfigError("compare needs at least two different runs: raypod compare RUN RUN...")
    tables = _fitting(_rows(runs), width_of(sys.stdout))
    show("\n\n".join("\n".join(format_table(each)) for each in tables))
    if len(runs) > _MOST_WITHOUT_PLOT:
        words = ["raypod", "report", *args.runs, "--output", "compare.html"]
        show(f"parallel coordinates of these runs: {' '.join(map(shlex.quote, words))}", sys.stderr)
    return 0


def _rows(runs: Sequence[Dict[str, Any]]) -> List[List[str]]:
    """Return the table: a column per run."""
    names = [run["name"] for run in runs]
    headings = [name if names.count(name) == 1 else run["id"] for name, run in zip(names, runs)]
    rows = [["", *headings], ["state", *(_state(run) for run in runs)]]
    for name in differing_settings([run["config"] for run in runs]):
        rows.append([name, *(_text(run["config"].get(name)) for run in runs)])
    found = [{(each["split"], each["name"]): each for each in run["results"]} for run in runs]
    for split, name in dict.fromkeys(key for each in found for key in each):
        results = [each.get((split, name), {}) for each in found]
        rows.append([f"{split} {name}, best", *map(_best, results)])
        rows.append([f"{split} {name}, last", *(_text(each.get("last")) for each in results)])
    return rows


def _fitting(rows: List[List[str]], width: Optional[int]) -> List[List[List[str]]]:
    """Return tables of all runs, each with as many as fit in the columns of a terminal; None for no terminal."""
    widths = [max(map(len, column)) + _GAP for column in zip(*rows)]
    blocks: List[List[int]] = [[]]
    for column in range(1, len(widths)):
        needed = widths[0] + sum(widths[each] for each in (*blocks[-1], column)) - _GAP
        if width is not None and blocks[-1] and needed > width:
            blocks.append([])
        blocks[-1].append(column)
    return [[[row[0], *(row[column] for column in block)] for row in rows] for block in blocks]


def _state(run: Dict[str, Any]) -> str:
    update, total = run["update"], run["total_updates"]
    return f"{run['state']}, {update} of {total} updates" if update is not None and total else str(run["state"])


def _best(result: Dict[str, Any]) -> str:
    if result.get("best") is None:
        return _NOTHING
    return f"{_text(result['best'])} (update {result['update']})"


def _text(value: Any) -> str:
    if value is None:
        return _NOTHING
    return f"{value:.5g}" if isinstance(value, float) else str(value)
