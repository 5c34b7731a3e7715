"""A run of a million updates: `python scripts/bench_long_run.py [--updates 1000000] [--instances 2]`.

`raypod.api.training.Training`, as `raypod.train` uses it, with simulated instances instead of a fleet: run folder,
`metrics.jsonl`, ledger, event log, run state, status endpoint and report are those of a run. Printed are the time per
update and the resident memory of the coordinator at each tenth of the run, what the report at its end costs, and how
long a run that resumes takes to read the folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

from raypod.api import training
from raypod.events import CallReport, EvaluationDone, RunEnded, UpdateDone
from raypod.plan import layout
from raypod.plan.cluster import LOCAL
from raypod.plan.plan import Plan, make_plan
from raypod.plan.resolve import from_values
from raypod.runs import ledger, run_folder
from raypod.runs.callback import Reporter
from raypod.runs.sinks import JsonLines
from raypod.runtime.coordinator.stop import Stop
from raypod.runtime.workers.scripted import ScriptedFleet
from raypod.training.tasks.registry import facts_of


class LongFleet(ScriptedFleet):
    """Reports what instances report."""

    def reports(self, update: int) -> List[CallReport]:
        """See `ScriptedFleet.reports`."""
        times: Dict[str, Any] = {"call_s": 0.001, "data_wait_s": 0.0001, "samples_digest": "0123456789abcdef"}
        return [dataclasses.replace(each, **times) for each in super().reports(update)]


def plan_of(updates: int, instances: int, folder: str) -> Plan:
    """Return a plan of one epoch."""
    config = from_values(
        {
            "data": {"dataset": "synthetic", "samples": instances * (updates + 1)},
            "training": {"batch_size": 1, "updates": updates, "epochs": 1},
            "pod": {"replicas": instances, "num_instances": instances},
            "run": {"run_dir": folder},
        }
    )
    return make_plan(config, LOCAL, facts_of(config), folder)


def train(plan: Plan, step: int) -> None:
    """Run the plan; print a row every `step` updates, and for the end of the run."""
    training.fleet_for = lambda planned, log: LongFleet(planned)  # type: ignore[assignment]
    print("| updates | microseconds per update | resident memory, MB | metrics.jsonl, MB | ledger.jsonl, MB |")
    print("|---|---|---|---|---|")
    began_s, folder = time.perf_counter(), Path(plan.run_dir)
    with training.claimed(plan, print) as run:
        for event in training.Training(run, Reporter(), Stop()).events():
            if isinstance(event, UpdateDone) and event.update % step == 0:
                per_update = 1e6 * (time.perf_counter() - began_s) / step
                sizes = " | ".join(
                    f"{(folder / name).stat().st_size / 1e6:.0f}" for name in (layout.METRICS, layout.LEDGER)
                )
                print(f"| {event.update} | {per_update:.0f} | {_resident_mb():.1f} | {sizes} |", flush=True)
                began_s = time.perf_counter()
            if isinstance(event, RunEnded):
                began_s = time.perf_counter()
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"\nreport and summary: {time.perf_counter() - began_s:.2f} s, peak of the process {peak_mb:.0f} MB")


def resume(plan: Plan) -> None:
    """Print how long the steps of a resume that read the files of the run take."""
    folder, total = Path(plan.run_dir), plan.total_updates

    def open_lines(update: int) -> None:
        JsonLines(folder / layout.METRICS, UpdateDone, update).close()
        JsonLines(folder / layout.EVALUATIONS, EvaluationDone, update).close()

    steps: Dict[str, Callable[[], object]] = {
        "evaluations before the resume": lambda: run_folder.evaluations_until(plan, total),
        "generation, from the ledger": lambda: ledger.last_generation(plan.run_dir),
        "newest update": lambda: run_folder.last_update(folder),
        "continue after the newest update": lambda: open_lines(total),
        "continue 1,000 updates before it": lambda: open_lines(total - 1000),
        "continue in the middle": lambda: open_lines(total // 2),
    }
    print("\n| step of a resume | s |\n|---|---|")
    for name, step in steps.items():
        began_s = time.perf_counter()
        step()
        print(f"| {name} | {time.perf_counter() - began_s:.4f} |")


def _resident_mb() -> float:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=1_000_000)
    parser.add_argument("--instances", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_of(args.updates, args.instances, f"{folder}/run")
        train(plan, args.updates // 10)
        resume(plan)


if __name__ == "__main__":
    main()
