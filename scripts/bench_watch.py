"""The cost of receiving the reports of many instances: `python scripts/bench_watch.py [--instances 4 16 64]`.

Real Ray actors without CPUs report calls through streams, as instances do: all at the same time, every `--interval`
seconds. One column takes one message per `ray.wait`, the other one everything that is ready. Both receive the same
streams in the same run, in alternating rounds. Figures are microseconds per call of all instances (medians): the CPU
time of the receiving thread, and the time to receive reports that have all arrived already.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["RAY_AUTH_MODE"] = "disabled"

import ray  # noqa: E402

from raypod.events import CallReport  # noqa: E402 - the checkout's own
from raypod.fleet.ray_wait import NO_VALUE, take_ready  # noqa: E402

Receive = Callable[[List[Any]], int]


class Instance:
    """Reports calls."""

    def ready(self) -> bool:
        """Return True: the actor is started."""
        return True

    def run(self, calls: int, first_s: float, interval_s: float) -> Iterator[List[CallReport]]:
        """Yield a report per call, at times that are the same for all instances."""
        for call in range(calls):
            time.sleep(max(0.0, first_s + call * interval_s - time.time()))
            yield [CallReport(0, call, (((1.0, 1.0),),))]


def one_message_per_wait(streams: List[Any]) -> int:
    """Receive all items of the streams; return their number. The baseline."""
    pending, received = list(streams), 0
    while pending:
        for stream in ray.wait(pending, timeout=0.2)[0]:
            try:
                ray.get(next(stream))
                received += 1
            except StopIteration:
                pending.remove(stream)
    return received


def everything_ready(streams: List[Any]) -> int:
    """Do the same with `take_ready`."""
    pending, received = list(streams), 0
    while pending:
        for arrival in take_ready(ray, pending, 0.2):
            received += arrival.value is not NO_VALUE
            if arrival.is_finished:
                pending.remove(arrival.ref)
    return received


def microseconds(receive: Receive, actors: List[Any], calls: int, interval_s: float) -> List[float]:
    """Return CPU time per call while reports arrive, and time per call once all have arrived."""
    streams = [
        each.run.options(num_returns="streaming").remote(calls, time.time() + 0.5, interval_s) for each in actors
    ]
    began_s = time.thread_time()
    assert receive(streams) == calls * len(actors)
    arriving_s = time.thread_time() - began_s
    streams = [each.run.options(num_returns="streaming").remote(calls, 0.0, 0.0) for each in actors]
    ray.wait([stream.completed() for stream in streams], num_returns=len(streams))
    began_s = time.perf_counter()
    assert receive(streams) == calls * len(actors)
    return [1e6 * arriving_s / calls, 1e6 * (time.perf_counter() - began_s) / calls]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--calls", type=int, default=100, help="calls per round")
    parser.add_argument("--interval", type=float, default=0.1, help="seconds between two calls")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
    receivers: Dict[str, Receive] = {"one message per wait": one_message_per_wait, "all ready": everything_ready}
    print(f"Ray {ray.__version__}\n| instances | receiver | CPU while arriving, us/call | all arrived, us/call |")
    print("|---|---|---|---|")
    actors: List[Any] = []
    for instances in args.instances:
        actors += [ray.remote(Instance).options(num_cpus=0).remote() for _ in range(instances - len(actors))]
        ray.get([actor.ready.remote() for actor in actors])
        rounds: Dict[str, List[List[float]]] = {name: [] for name in receivers}
        for _ in range(args.rounds):
            for name, receive in receivers.items():
                rounds[name].append(microseconds(receive, actors, args.calls, args.interval))
        for name, measured in rounds.items():
            arriving, arrived = (statistics.median(column) for column in zip(*measured))
            print(f"| {instances} | {name} | {arriving:.0f} | {arrived:.0f} |", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
