"""A long training under random faults: `python scripts/chaos.py --minutes 5 --seed 1`.

Four instances under Ray train on digits while processes are killed (one, two at once, or one while the last repair is
under way) and frozen, at random moments that follow from the seed, until SIGTERM ends the run. Afterwards the same
updates are done by one instance in this process, undisturbed; the weights must be the same, bit for bit. Ends in one
line, and with exit code 0 if all is as it should be.
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
from raypod.record.metrics import MetricsFold  # noqa: E402
from raypod.record.sinks import Sinks  # noqa: E402

INSTANCES = 4
FAULTS = {"kill": 5, "kill-two": 2, "kill-again": 2, "freeze": 2}  # how often, relative to each other
MEAN_PAUSE_S = 15.0
DISTURBED_SHARE = 0.7  # of the time; the rest is for the undisturbed run, which is quicker
ENDLESS = 10_000_000


def plan_for(folder: Path, fleet: str, updates: int) -> Plan:
    """4 replicas on digits; the learning rate does not depend on how many updates there are."""
    run = {"device": "emulated", "fleet": fleet, "max_restarts": 100_000, "checkpoint_every": "100 updates"}
    training = {"updates": updates, "epochs": 100_000, "lr_schedule": "constant", "learning_rate": 0.02}
    pod = {"replicas": 4, "num_instances": 1 if fleet == "inline" else INSTANCES}
    config = from_values({"run": {**run, "silent_after_s": 8}, "training": training, "pod": pod})
    plan = make_plan(config, LOCAL, dataset_size(config), str(folder / "run"))
    run_folder.open_for(plan)
    return plan


def events_of(plan: Plan, within_s: float = math.inf, begun: Callable[[], None] = lambda: None) -> List[Event]:
    """Run a plan, for a time at most; what it told. `begun`: all instances are up (a start is not repaired)."""
    end_s, is_stopped = time.monotonic() + within_s, False
    fleet: Any = InlineFleet(plan) if plan.config.run.fleet == "inline" else RayFleet(plan)
    told = []
    with Sinks(plan) as sinks, contextlib.closing(coordinator.run(plan, fleet, MetricsFold(plan, 0.0))) as events:
        for event in events:
            sinks.take(event)
            told.append(event)
            if isinstance(event, RunStarted):
                begun()
            elif isinstance(event, InstanceLost):
                print(f"  lost: instance {event.instance}, {event.kind}: {event.cause}", flush=True)
            elif isinstance(event, UpdateDone) and time.monotonic() > end_s and not is_stopped:
                is_stopped = True
                signal.raise_signal(signal.SIGTERM)
            elif isinstance(event, Repaired):
                print(f"  repaired in {event.seconds:.1f} s, after update {event.update}", flush=True)
    return told


class Planter(threading.Thread):
    """Plants faults until it is told to end."""

    def __init__(self, plan: Plan, seed: int) -> None:
        super().__init__(daemon=True)
        self._plan, self._random, self._ended = plan, random.Random(seed), threading.Event()
        self.planted: Counter[str] = collections.Counter()

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
        """No further faults."""
        self._ended.set()
        if self.is_alive():
            self.join()

    def _send(self, kind: str, number: int, instance: int) -> None:
        """A signal to the newest process of an instance, if it has one and that lives."""
        with contextlib.suppress(OSError, ValueError):
            text = Path(self._plan.log_file(instance)).read_text()
            os.kill(int(text.rpartition(", pid ")[2].partition(":")[0]), number)
            self.planted[kind] += 1


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="about how long it takes")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_for(Path(folder, "disturbed"), "ray", ENDLESS)
        planter = Planter(plan, args.seed)
        print(f"under faults (seed {args.seed})", flush=True)
        try:
            told = events_of(plan, DISTURBED_SHARE * 60 * args.minutes, planter.start)
        finally:
            planter.end()
        unproved = [line for line in verify_data.verify(Path(plan.run_dir)).lines if line.startswith("NOT PROVED: ")]
        updates = next(event.updates for event in told if isinstance(event, RunEnded))
        print(f"{updates} updates, undisturbed", flush=True)
        reference = events_of(plan_for(Path(folder, "undisturbed"), "inline", updates))
    done = [event.update for event in told if isinstance(event, UpdateDone)]
    samples = plan.geometry.global_batch_size
    lost, repeated = (updates - len(set(done))) * samples, (len(done) - len(set(done))) * samples
    unknown = [line for line in unproved if line.endswith("; its report was lost with it")]
    # An epoch with such a call cannot be proved either.
    wrong = [line for line in unproved if line not in unknown and not line.endswith("are not proved to be seen")]
    print("".join(f"{line}\n" for line in wrong), end="")
    repairs = sum(isinstance(event, Repaired) for event in told)
    ended = [next(event for event in each if isinstance(event, RunEnded)) for each in (reference, told)]
    is_equal = ended[0].weights_sha256 == ended[1].weights_sha256
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(planter.planted.items())) or "none"
    print(
        f"chaos: {sum(planter.planted.values())} faults planted ({kinds}), {repairs} repairs, {updates} updates, "
        f"samples lost {lost}, samples repeated {repeated}, calls whose report was lost {len(unknown)}, hash "
        f"{'equal' if is_equal else 'DIFFERENT'}"
    )
    return 0 if is_equal and not lost and not repeated and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
