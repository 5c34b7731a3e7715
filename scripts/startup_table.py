"""Print where the start-up time of a run went, as a Markdown table: `python scripts/startup_table.py RUN [RUN ...]`.

Each run is a column: the steps of its first start, from `run_started.seconds` in events.jsonl. Indented steps are parts
of the start of the instances, those of the slowest instance.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Dict, List

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from raypod.errors import ConfigError
from raypod.observe.report.run_data import RunReader
from raypod.observe.report.timeline import PART_OF_IT


def main() -> int:
    """Print the table; return 2 with one line if a folder holds no start of a run."""
    parser = argparse.ArgumentParser(description="Print where the start-up time of runs went, as a Markdown table.")
    parser.add_argument("runs", metavar="RUN", nargs="+")
    folders = [Path(name) for name in parser.parse_args().runs]
    try:
        columns = [steps_of(folder) for folder in folders]
    except ConfigError as error:
        print(f"startup_table: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(table([folder.name for folder in folders], columns)))
    return 0


def steps_of(folder: Path) -> Dict[str, float]:
    """Return the seconds of each step of the first start, with `total` and, if it is known, `first update`."""
    reader = RunReader(folder)
    reader.refresh()
    data = reader.data()
    if not data["starts"]:
        raise ConfigError(f"{folder} holds no start of a run: events.jsonl has no run_started")
    start = data["starts"][0]
    steps: Dict[str, float] = dict(start["steps"])
    if start["total_s"] is not None:
        outer_s = sum(value for name, value in steps.items() if not name.startswith(PART_OF_IT))
        steps["everything else"] = max(0.0, start["total_s"] - outer_s)
        steps["total"] = start["total_s"]
    first_s = (data["summary"] or {}).get("seconds_to_first_update")
    if isinstance(first_s, (int, float)):
        steps["until the first update"] = first_s
    return steps


def table(names: List[str], columns: List[Dict[str, float]]) -> List[str]:
    """Return the lines of the table; the steps are in the order of the runs, the sums come last."""
    last = ("everything else", "total", "until the first update")
    steps = list(dict.fromkeys(step for column in columns for step in column if step not in last))
    lines = [f"| step | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for step in [*steps, *(each for each in last if any(each in column for column in columns))]:
        cells = [f"{column[step]:.2f} s" if step in column else "-" for column in columns]
        label = step.replace(PART_OF_IT, "&nbsp;&nbsp;in the slowest instance: ")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
