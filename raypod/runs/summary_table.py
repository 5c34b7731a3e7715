"""The table at the end of a run: time, throughput, restarts, and where its files are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from raypod.plan.layout import REPORT, SUMMARY
from raypod.plan.plan import Plan
from raypod.plan.tables import aligned, shown_path
from raypod.system.files import parse_json


def summary_table(plan: Plan, seconds: float, width: Optional[int] = None) -> str:
    """Return the table of a run that has ended; `seconds` is its time so far, `width` that of a terminal."""
    folder = Path(plan.run_dir)
    summary = parse_json((folder / SUMMARY).read_text())
    rows: List[Tuple[str, str]] = []
    best = plan.best_metric
    value = summary.get(f"test_{best.name}")
    if value is not None:
        rows.append((best.name.replace("_", " "), best.text(value)))
    first_s = summary["seconds_to_first_update"]
    started = "" if first_s is None else f", {_duration(first_s)} of them until the first update"
    rows.append(("time", f"{_duration(seconds)}{started}"))
    rows.append(("throughput", _throughput(plan, summary)))
    rows.append(("restarts", str(summary["restarts"])))
    if summary["checkpoint"]:
        rows.append(("checkpoint", shown_path(str(folder / summary["checkpoint"]))))
    if (folder / REPORT).is_file():
        rows.append(("report", shown_path(str(folder / REPORT))))
    rows.append(("run folder", shown_path(plan.run_dir)))
    return "\n".join(aligned(rows, width))


def _throughput(plan: Plan, summary: Dict[str, Any]) -> str:
    if not summary["samples_per_s"]:
        return "not known: the first call is not timed"
    rates = plan.task.part_rates(summary["samples_per_s"])
    names = rates or {f"{plan.task.samples_are}_per_s": summary["samples_per_s"]}
    shown = ", ".join(f"{rate:.0f} {name.replace('_per_s', '/s')}" for name, rate in names.items())
    return f"{shown}; {100 * summary['data_wait_share']:.1f} % of the calls' time waiting for data"


def _duration(seconds: float) -> str:
    """Return a duration, as in 7.6 s, 2 min 5 s, or 1 h 2 min."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
