"""The cost of the coordinator per update and per instance, from 4 to 16,384 instances with scripted reports.

    python scripts/bench_coordinator.py [--instances 4 16 64 256 1024 4096 16384] [--updates 50] [--rounds 5]

Everything between the reports of the instances and the events of the run is measured, and what records the events:
the aggregation of metrics, `metrics.jsonl`, the ledger's lines, the event log, and the state behind the status
endpoint, after the first update. The time in which the simulated instances make reports does not count. Medians of
interleaved rounds (smallest - largest).

"growth" is the cost per instance relative to the row before: more than 1 means faster than linear growth.
"memory" is the growth of the resident memory over the run, with the reports of one update. `--no-gc` disables Python's
garbage collector.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

from raypod.events import CallReport, UpdateDone
from raypod.observe.status.run_status import RunStatus
from raypod.plan.cluster import LOCAL
from raypod.plan.plan import make_plan
from raypod.plan.resolve import from_values
from raypod.runs.event_log import EventLog
from raypod.runs.metrics import MetricsAggregator
from raypod.runs.sinks import Sinks
from raypod.runtime.coordinator import coordinator
from raypod.runtime.workers.scripted import ScriptedFleet
from raypod.training.tasks.registry import facts_of


class TimedFleet(ScriptedFleet):
    """Measures the time in which it makes reports."""

    reporting_s = 0.0

    def reports(self, update: int) -> List[CallReport]:
        """See `ScriptedFleet.reports`."""
        began_s = time.perf_counter()
        times: Dict[str, Any] = {
            "call_s": 0.1,
            "data_wait_s": 0.001,
            "peer_wait_s": 0.01,
            "samples_digest": "0123456789abcdef",
        }
        found = [dataclasses.replace(each, **times) for each in super().reports(update)]
        self.reporting_s += time.perf_counter() - began_s
        return found


def measure(instances: int, updates: int) -> Tuple[float, float, float]:
    """Run a plan; return the seconds per update, the seconds of a status snapshot, and the memory in MB."""
    config = from_values(
        {
            "data": {"dataset": "synthetic", "samples": instances * (updates + 1)},
            "training": {"batch_size": 1, "updates": updates, "epochs": 1},
            "pod": {"replicas": instances, "num_instances": instances},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(config, LOCAL, facts_of(config), folder)
        fleet, metrics = TimedFleet(plan), MetricsAggregator(plan, time.monotonic())
        gc.collect()
        before = _resident_mb()
        status = RunStatus(plan, fleet.heartbeats)
        with EventLog(Path(folder), {}) as log, Sinks(plan) as sinks:
            at_s = []  # when each update was done, without the time of the reports
            for event in coordinator.run(plan, fleet, metrics):
                for recorder in (sinks, status, log):
                    recorder.on_event(event)
                if isinstance(event, UpdateDone):
                    at_s.append(time.perf_counter() - fleet.reporting_s)
            seconds = (at_s[-1] - at_s[0]) / (updates - 1)
            began_s = time.perf_counter()
            status.snapshot()
            return seconds, time.perf_counter() - began_s, _resident_mb() - before


def _resident_mb() -> float:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, nargs="+", default=[4, 16, 64, 256, 1024, 4096, 16384])
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-gc", action="store_true")
    args = parser.parse_args()
    if args.no_gc:
        gc.disable()
    taken: Dict[int, List[Tuple[float, float, float]]] = {instances: [] for instances in args.instances}
    for _ in range(args.rounds):
        for instances in args.instances:
            taken[instances].append(measure(instances, args.updates))
    print(
        "| instances | microseconds per update | per update and instance | growth | status snapshot, ms | memory, MB |"
    )
    print("|---|---|---|---|---|---|")
    before = None
    for instances, rounds in taken.items():
        updates, snapshots, memory = (list(column) for column in zip(*rounds))
        median = statistics.median(updates)
        growth = "" if before is None else f"{median / instances / before:.2f}"
        before = median / instances
        spread = f"{1e6 * median:.0f} ({1e6 * min(updates):.0f} - {1e6 * max(updates):.0f})"
        snapshot = f"{1e3 * statistics.median(snapshots):.1f}"
        print(f"| {instances} | {spread} | {1e6 * before:.2f} | {growth} | {snapshot} | {max(memory):.1f} |")


if __name__ == "__main__":
    main()
