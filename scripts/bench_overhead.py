"""The cost of an update besides its arithmetic: `python scripts/bench_overhead.py [--rounds 5] [--updates 1488]`.

A model with few parameters and one image per replica is trained with 2 replicas, in one or two instances, inline and
under Ray. Each kind is a process of its own; rounds are interleaved. Medians in microseconds per update, with the
smallest and largest round:

* update: from update to update, as the coordinator receives them; the ratio is that to `inline 1 x 2` of the round;
* call: of the slowest instance, from the request of the data to the report; it contains `peers` and `data`;
* peers: the shortest wait for the other instance over the instances: what the exchange itself takes;
* data: wait for the data of the call;
* between: update - call: from one call to the next, and what the other processes take from the instances' cores;
* driver: CPU time of the process that runs the coordinator (for inline this includes the arithmetic).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List

ROOT = Path(__file__).resolve().parent.parent
BASELINE = "inline, 1 x 2"
KINDS: Dict[str, Dict[str, Any]] = {  # instances x replicas
    BASELINE: {"num_instances": 1, "fleet": "inline"},
    "Ray, 1 x 2": {"num_instances": 1, "fleet": "ray"},
    "Ray, 2 x 1": {"num_instances": 2, "fleet": "ray"},
    "Ray, 2 x 1, a snapshot per update": {"num_instances": 2, "fleet": "ray", "snapshot_every": 1},
    "Ray, 2 x 1, 16 device iterations": {"num_instances": 2, "fleet": "ray", "device_iterations": 16},
}
TARGETS = {"Ray, 2 x 1": 1600}
COLUMNS = ("update", "call", "peers", "data", "between", "driver")
_RUN_S = 180


def one(kind: str, updates: int) -> Dict[str, float]:
    """Run a kind in this process; return microseconds per update by column."""
    import raypod
    from raypod.events import CallDone, UpdateDone

    flags = {"dataset": "synthetic", "image": "1x8x8", "model": "tiny", "batch_size": 1, "replicas": 2, "epochs": 1}
    warm_up = updates // 3
    flags.update(KINDS[kind], updates=updates, samples=2 * (updates + 2), checkpoint_every=f"{updates} updates")
    began = ended = cpu_s = 0.0
    calls: List[List[float]] = []
    with tempfile.TemporaryDirectory() as folder, raypod.stream(run_dir=f"{folder}/run", **flags) as events:
        for event in events:
            if isinstance(event, UpdateDone):
                ended = event.time_s
                if event.update == warm_up:
                    began, cpu_s = ended, time.process_time()
                elif event.update == updates:
                    cpu_s = time.process_time() - cpu_s
            elif isinstance(event, CallDone) and event.first_update >= warm_up:
                peers = min((each.peer_wait_s or 0.0) for each in event.times)
                slowest = max(event.times, key=lambda each: each.call_s)
                calls.append([slowest.call_s, peers, slowest.data_wait_s])
    counted = updates - warm_up
    call, peers, data = (sum(column) / counted for column in zip(*calls))
    update = (ended - began) / counted
    values = (update, call, peers, data, update - call, cpu_s / counted)
    return {name: 1e6 * value for name, value in zip(COLUMNS, values)}


def measured(kind: str, updates: int, root: Path) -> Dict[str, float]:
    """Return the result of `one` in a new process, with the raypod of the folder `root`."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment.update(PYTHONPATH=str(root), OMP_NUM_THREADS="1")
    command = [sys.executable, __file__, "--one", kind, "--updates", str(updates)]
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_RUN_S,
        check=True,
        cwd=tempfile.gettempdir(),
    )
    figures: Dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=1488, help="a multiple of 48")
    parser.add_argument("--before", type=Path, help="another checkout of raypod, measured in the same rounds")
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--one", choices=list(KINDS), help="run this kind once, and print its figures as JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one, args.updates)))
        return
    roots = {"": ROOT, **({", before": args.before.resolve()} if args.before else {})}
    taken: Dict[str, List[Dict[str, float]]] = {
        kind + suffix: [] for kind in KINDS if kind in (BASELINE, *args.only) for suffix in roots
    }
    for number in range(args.rounds):
        for suffix in list(roots)[:: -1 if number % 2 else 1]:
            for kind in KINDS:
                if kind + suffix in taken:
                    taken[kind + suffix].append(measured(kind, args.updates, roots[suffix]))
    print(f"| | {' | '.join(COLUMNS)} | of {BASELINE} | target |\n|{'---|' * (len(COLUMNS) + 3)}")
    for kind, rounds in taken.items():
        cells = [_cell([each[name] for each in rounds]) for name in COLUMNS]
        ratio = statistics.median(a["update"] / b["update"] for a, b in zip(rounds, taken[BASELINE]))
        target = f"<= {TARGETS[kind]}" if kind in TARGETS else ""
        print(f"| {kind} | {' | '.join(cells)} | {ratio:.2f} | {target} |")


def _cell(values: List[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} - {max(values):.0f})"


if __name__ == "__main__":
    main()
