"""A long training with random faults: `python scripts/chaos.py --minutes 5 --seed 1`.

Four instances under Ray train on digits while processes are killed (one, two at once, or one during the repair of
another) and frozen, at random times that follow from the seed, until SIGTERM ends the run. Then one instance in this
process does the same updates without faults; the weights must be bitwise equal. The last line is the summary, and the
exit code is 0 if no sample and no update is lost or repeated and the weights are equal.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Counter, List

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from raypod.coordinator import coordinator  # noqa: E402 - the checkout's own
from raypod.datasets import dataset_size  # noqa: E402
from raypod.events import Event, InstanceLost, Repaired, RunEnded, RunStarted, UpdateDone  # noqa: E402
from raypod.fleet.inline import InlineFleet  # noqa: E402
from raypod.fleet.ray import RayFleet  # noqa: E402
from raypod.plan.cluster import LOCAL  # noqa: E402
from raypod.plan.plan import Plan, make_plan  # noqa: E402
from raypod.plan.resolve import from_values  # noqa: E402
from raypod.record import run_folder, verify_data  # noqa: E402 - the checkout's own
from raypod.record.metrics import MetricsAggregator  # noqa: E402
from raypod.record.sinks import Sinks  # noqa: E402

INSTANCES = 4
FAULTS = {"kill": 5, "kill-two": 2, "kill-again": 2, "freeze": 2}  # relative frequencies
MEAN_PAUSE_S = 15.0
FAULTY_SHARE = 0.7  # of the time; the rest is for the faster run without faults
ENDLESS = 10_000_000


def plan_for(folder: Path, fleet: str, updates: int) -> Plan:
    """Plan 4 replicas on digits; the learning rate does not depend on the number of updates."""
    run = {"device": "emulated", "fleet": fleet, "max_restarts": 100_000, "checkpoint_every": "100 updates"}
    training = {"updates": updates, "epochs": 100_000, "lr_schedule": "constant", "learning_rate": 0.02}
    pod = {"replicas": 4, "num_instances": 1 if fleet == "inline" else INSTANCES}
    config = from_values({"run": {**run, "silent_after_s": 8}, "training": training, "pod": pod})
    plan = make_plan(config, LOCAL, dataset_size(config), str(folder / "run"))
    run_folder.create(plan)
    return plan


def events_of(plan: Plan, within_s: float = math.inf, on_start: Callable[[], None] = lambda: None) -> List[Event]:
    """Run a plan for a limited time; return its events. `on_start` is called once all instances are started."""
    end_s, is_stopped = time.monotonic() + within_s, False
    fleet: Any = InlineFleet(plan) if plan.config.run.fleet == "inline" else RayFleet(plan)
    found = []
    with Sinks(plan) as sinks, contextlib.closing(coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0))) as events:
        for event in events:
            sinks.handle(event)
            found.append(event)
            if isinstance(event, RunStarted):
                on_start()
            elif isinstance(event, InstanceLost):
                print(f"  lost: instance {event.instance}, {event.kind}: {event.cause}", flush=True)
            elif isinstance(event, UpdateDone) and time.monotonic() > end_s and not is_stopped:
                is_stopped = True
                signal.raise_signal(signal.SIGTERM)
            elif isinstance(event, Repaired):
                print(f"  repaired in {event.seconds:.1f} s, after update {event.update}", flush=True)
    return found


class FaultInjector(threading.Thread):
    """Injects faults until `end`."""

    def __init__(self, plan: Plan, seed: int) -> None:
        super().__init__(daemon=True)
        self._plan, self._random, self._ended = plan, random.Random(seed), threading.Event()
        self.injected: Counter[str] = collections.Counter()

    def run(self) -> None:
        kinds = list(FAULTS)
        while not self._ended.wait(self._random.expovariate(1 / MEAN_PAUSE_S)):
            (kind,) = self._random.choices(kinds, [FAULTS[kind] for kind in kinds])
            victims = self._random.sample(range(INSTANCES), 2)
            if kind == "freeze":
                self._send(kind, signal.SIGSTOP, victims[0])
            else:
                self._send(kind, signal.SIGKILL, victims[0])
            if kind == "kill-again":
                self._ended.wait(self._random.uniform(0.5, 4.0))
            if kind.startswith("kill-"):
                self._send(kind, signal.SIGKILL, victims[1])

    def end(self) -> None:
        """Stop injecting faults."""
        self._ended.set()
        if self.is_alive():
            self.join()

    def _send(self, kind: str, number: int, instance: int) -> None:
        """Send a signal to the newest process of an instance, if it is alive."""
        with contextlib.suppress(OSError, ValueError):
            text = Path(self._plan.log_file(instance)).read_text()
            os.kill(int(text.rpartition(", pid ")[2].partition(":")[0]), number)
            self.injected[kind] += 1


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="about how long it takes")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_for(Path(folder, "faulty"), "ray", ENDLESS)
        injector = FaultInjector(plan, args.seed)
        print(f"with faults (seed {args.seed})", flush=True)
        try:
            disturbed = events_of(plan, FAULTY_SHARE * 60 * args.minutes, injector.start)
        finally:
            injector.end()
        unproved = [line for line in verify_data.verify(Path(plan.run_dir)).lines if line.startswith("NOT PROVED: ")]
        updates = next(event.updates for event in disturbed if isinstance(event, RunEnded))
        print(f"{updates} updates, without faults", flush=True)
        reference = events_of(plan_for(Path(folder, "reference"), "inline", updates))
    done = [event.update for event in disturbed if isinstance(event, UpdateDone)]
    samples = plan.geometry.global_batch_size
    lost, repeated = (updates - len(set(done))) * samples, (len(done) - len(set(done))) * samples
    unknown = [line for line in unproved if line.endswith("; its report was lost with it")]
    # The epoch of such a call cannot be proved either.
    wrong = [line for line in unproved if line not in unknown and not line.endswith("are not proved to be seen")]
    print("".join(f"{line}\n" for line in wrong), end="")
    repairs = sum(isinstance(event, Repaired) for event in disturbed)
    ended = [next(event for event in each if isinstance(event, RunEnded)) for each in (reference, disturbed)]
    is_equal = ended[0].weights_sha256 == ended[1].weights_sha256
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(injector.injected.items())) or "none"
    print(
        f"chaos: {sum(injector.injected.values())} faults injected ({kinds}), {repairs} repairs, {updates} updates, "
        f"samples lost {lost}, samples repeated {repeated}, calls whose report was lost {len(unknown)}, hash "
        f"{'equal' if is_equal else 'DIFFERENT'}"
    )
    return 0 if is_equal and not lost and not repeated and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
