"""The cost of the coordinator per update and per instance, from 4 to 256 instances with scripted reports.

    python scripts/bench_coordinator.py [--instances 4 16 64 256] [--updates 200] [--rounds 5]

Everything between the reports of the instances and the events of the run is measured: aggregation of metrics, the
ledger's digests, checkpoints without their writing. Medians of interleaved rounds. The last column is the cost per
instance relative to the first row: more than 1 means faster than linear growth.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Dict, List

from raypod.coordinator import coordinator
from raypod.fleet.scripted import ScriptedFleet
from raypod.plan.cluster import LOCAL
from raypod.plan.plan import make_plan
from raypod.plan.resolve import from_values
from raypod.record.metrics import MetricsAggregator
from raypod.tasks.registry import facts_of


def seconds(instances: int, updates: int) -> float:
    """Run a plan; return the seconds per update."""
    config = from_values(
        {
            "data": {"dataset": "synthetic", "samples": instances * (updates + 1)},
            "training": {"batch_size": 1, "updates": updates, "epochs": 1},
            "pod": {"replicas": instances, "num_instances": instances},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(config, LOCAL, facts_of(config), f"{folder}/run")
        fleet, metrics = ScriptedFleet(plan), MetricsAggregator(plan, time.monotonic())
        began = time.perf_counter()
        for _ in coordinator.run(plan, fleet, metrics):
            pass
        return (time.perf_counter() - began) / updates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    taken: Dict[int, List[float]] = {instances: [] for instances in args.instances}
    for _ in range(args.rounds):
        for instances in args.instances:
            taken[instances].append(seconds(instances, args.updates))
    print("| instances | microseconds per update | per update and instance | of the first row |\n|---|---|---|---|")
    first = statistics.median(taken[args.instances[0]]) / args.instances[0]
    for instances, each in taken.items():
        per_update = statistics.median(each)
        per_instance = per_update / instances
        print(f"| {instances} | {1e6 * per_update:.0f} | {1e6 * per_instance:.2f} | {per_instance / first:.2f} |")


if __name__ == "__main__":
    main()
