"""The cost of receiving the reports of many instances: `python scripts/bench_watch.py [--instances 4 8 16 32 64]`.

The message path of a run under Ray: processes of `InstanceProcess`, one per instance, in a private Ray session; each
reports its calls through its stream and replies to heartbeats. `Watch` receives all of it, and `MetricsAggregator`
folds it into updates. Only the instance within the process is a small one, without torch: it waits for the time of its
next call, which is the same for all, every `--interval` seconds (two cores send the reports of 256 processes in about
0.5 s). The same processes serve all sizes, in interleaved rounds. `--per-core N` puts the instances into N processes
per core, each with a stream of its own: idle processes of Ray use CPU time, too. `--baseline` adds a loop that takes
one message per `ray.wait`.

Columns, medians over the rounds (smallest - largest), in microseconds per call and instance:
    CPU of the thread         of the thread that receives, heartbeats and aggregation included
    CPU of the process        of all threads of the driver, with those of Ray
    wall                      of the thread, to receive and aggregate reports that have all arrived already
and the number of polls of Ray per call. Before the table: the seconds in which the processes started, and the CPU
seconds of each kind of process; `--no-template` starts them as Ray does by itself.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Counter, Dict, Iterator, List, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
import ray  # noqa: E402

from raypod.events import CallReport, InstanceStarted  # noqa: E402 - the checkout's own
from raypod.plan.cluster import LOCAL  # noqa: E402
from raypod.plan.plan import Plan, Segment, make_plan  # noqa: E402
from raypod.plan.resolve import from_values  # noqa: E402
from raypod.runs.metrics import MetricsAggregator  # noqa: E402
from raypod.runtime.worker.control import Heartbeat  # noqa: E402
from raypod.runtime.worker.process import InstanceProcess  # noqa: E402
from raypod.runtime.workers import ray_watch  # noqa: E402
from raypod.runtime.workers.ray_replace import ProcessKiller  # noqa: E402
from raypod.runtime.workers.ray_session import RaySession  # noqa: E402
from raypod.training.tasks.registry import facts_of  # noqa: E402

Receive = Callable[[Plan, List[Any], List[Any]], int]
_START_S = 600.0
_STACKED_S = 0.03  # between two calls that are received later: just above the interval in which calls share a message


class SmallInstance:
    """What `InstanceProcess` needs of an instance; a call waits until its time."""

    def __init__(self, index: int, metrics: int) -> None:
        self._index, self._metrics = index, metrics
        self.heartbeat = Heartbeat(index, reports_host=index == 0)
        self._first_s = self._interval_s = 0.0

    def set_pace(self, first_s: float, interval_s: float) -> None:
        """Make the next segment end its first call at `first_s`, seconds since 1970, and then one per `interval_s`."""
        self._first_s, self._interval_s = first_s, interval_s

    def run(self, segment: Segment) -> Iterator[CallReport]:
        """Yield a report per call."""
        for number, update in enumerate(range(segment.first_update, segment.end)):
            with self.heartbeat.in_call(number):
                time.sleep(max(0.0, self._first_s + number * self._interval_s - time.time()))
            sums = (((1.0 / (1 + self._index), 1.0) * self._metrics,),)
            yield CallReport(self._index, update, sums, call_s=self._interval_s, samples_digest="0123456789abcdef")


class SmallProcess(InstanceProcess):
    """The process of an instance, with a small instance."""

    def _build(self) -> InstanceStarted:
        small: Any = SmallInstance(self._index, len(self._plan.task.metrics))
        self._instance = small
        return InstanceStarted(self._index, "localhost", os.getpid(), "emulated", "small", 1, ())


class SmallProcesses:
    """Several instances in one process, each with its thread and its stream."""

    def __init__(self, plan: Plan, indices: List[int], working_dir: str) -> None:
        self._members = {index: SmallProcess(plan, index, working_dir) for index in indices}

    def of(self, index: int, method: str, *arguments: Any) -> Any:
        """Call a method of the process of an instance."""
        return getattr(self._members[index], method)(*arguments)

    def run(self, index: int, segment: Segment) -> Iterator[List[CallReport]]:
        """See `InstanceProcess.run`."""
        yield from self._members[index].run(segment)


class Member:
    """An instance of `SmallProcesses`, with the methods of an actor of its own."""

    def __init__(self, actor: Any, index: int) -> None:
        self._actor, self._index = actor, index

    def __getattr__(self, name: str) -> Any:
        if name == "run":
            return _Method(self._actor.run, self._index)
        return _Method(self._actor.of, self._index, name)


class _Method:
    """A method of an actor with its first arguments."""

    def __init__(self, method: Any, *first: Any) -> None:
        self._method, self._first = method, first

    def options(self, **options: Any) -> _Method:
        """See the method of Ray."""
        return _Method(self._method.options(**options), *self._first)

    def remote(self, *arguments: Any) -> Any:
        """See the method of Ray."""
        return self._method.remote(*self._first, *arguments)


class Counted:
    """The module `ray`, with its calls of `wait` counted."""

    waits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(ray, name)

    def wait(self, *arguments: Any, **named: Any) -> Any:
        """Call `ray.wait`."""
        Counted.waits += 1
        return ray.wait(*arguments, **named)


def one_message_per_wait(plan: Plan, actors: List[Any], streams: List[Any]) -> int:
    """Receive all reports of the streams; return the number of updates. The baseline, without heartbeats."""
    metrics, pending, updates = MetricsAggregator(plan, time.monotonic()), list(streams), 0
    while pending:
        Counted.waits += 1
        for stream in ray.wait(pending, timeout=0.2)[0]:
            try:
                for report in ray.get(next(stream)):
                    updates += len(metrics.add(report, time.monotonic()))
            except StopIteration:
                pending.remove(stream)
    return updates


def by_watch(plan: Plan, actors: List[Any], streams: List[Any]) -> int:
    """Do the same as the coordinator does in a segment."""
    counted: Any = Counted()
    watch = ray_watch.Watch(counted, plan, actors, ["localhost"] * len(actors), ProcessKiller(ray))
    metrics, updates = MetricsAggregator(plan, time.monotonic()), 0
    watch.add_streams({stream: index for index, stream in enumerate(streams)})
    for index, reports in watch.follow():
        for report in reports if index is not None else ():
            updates += len(metrics.add(report, time.monotonic()))
            metrics.take_calls()
    return updates


def measure(receive: Receive, plan: Plan, actors: List[Any], interval_s: float) -> List[float]:
    """Return the columns of the table for one round; all values but the last are microseconds."""
    per_report = 1e6 / plan.total_updates / len(actors)
    segment = plan.next_segment(0)

    def begin(interval_s: float) -> List[Any]:
        first_s = time.time() + 0.5
        ray.get([actor.call.remote("set_pace", first_s, interval_s) for actor in actors])
        return [actor.run.options(num_returns="streaming").remote(segment) for actor in actors]

    streams = begin(interval_s)
    Counted.waits, began_s, process_s = 0, time.thread_time(), time.process_time()
    assert receive(plan, actors, streams) == plan.total_updates
    arriving_s, of_process_s, waits = time.thread_time() - began_s, time.process_time() - process_s, Counted.waits
    streams = begin(_STACKED_S)
    ray.wait([stream.completed() for stream in streams], num_returns=len(streams))
    time.sleep(0.3)
    wall_s = time.perf_counter()
    assert receive(plan, actors, streams) == plan.total_updates
    wall_s = time.perf_counter() - wall_s
    return [*(per_report * each for each in (arriving_s, of_process_s, wall_s)), waits / plan.total_updates]


def plan_of(instances: int, calls: int, run_dir: str) -> Plan:
    """Return the plan of a run of a replica per instance with one segment of `calls` calls."""
    config = from_values(
        {
            "data": {"dataset": "synthetic", "samples": instances * (calls + 1)},
            "training": {"batch_size": 1, "updates": calls, "epochs": 1},
            "pod": {"replicas": instances, "num_instances": instances},
        }
    )
    return make_plan(config, LOCAL, facts_of(config), run_dir)


def start(instances: int, per_core: Optional[int], session: RaySession, run_dir: str) -> List[Any]:
    """Start the processes of a local Ray session; print the time, and the CPU seconds of each kind of process."""
    session.open()
    before_s, began_s, plan = _cpu_seconds(), time.monotonic(), plan_of(instances, 1, run_dir)
    processes = min(instances, per_core * (os.cpu_count() or 1)) if per_core else instances
    if per_core:
        members = [list(range(first, instances, processes)) for first in range(processes)]
        several = ray.remote(SmallProcesses).options(num_cpus=0, max_concurrency=8 * len(members[0]))
        hosts = [several.remote(plan, each, str(ROOT)) for each in members]
        actors: List[Any] = [Member(hosts[index % processes], index) for index in range(instances)]
    else:
        small = ray.remote(SmallProcess).options(num_cpus=0, max_concurrency=8)
        actors = [small.remote(plan, index, str(ROOT)) for index in range(instances)]
    ray.get([actor.build.remote() for actor in actors], timeout=_START_S)
    print(f"Ray {ray.__version__}; {processes} processes started in {time.monotonic() - began_s:.1f} s; CPU seconds:")
    for kind, seconds in sorted((_cpu_seconds() - before_s).items()):
        print(f"    {kind:20} {seconds:6.1f}, per process {seconds / processes:.3f}", flush=True)
    return actors


def _cpu_seconds() -> Counter[str]:
    """Return the CPU seconds so far of this process and those that it has started, by kind."""
    seconds: Counter[str] = collections.Counter()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            words = " ".join(process.cmdline())
            kinds = ("gcs_server", "raylet", "worker_template", "agent", "ray::", "bench_watch")
            times = process.cpu_times()
            seconds[next((kind for kind in kinds if kind in words), "others")] += times.user + times.system
    return seconds


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--calls", type=int, default=16, help="calls per round")
    parser.add_argument("--interval", type=float, default=0.2, help="seconds between two calls")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--baseline", action="store_true", help="also measure one message per wait")
    parser.add_argument("--per-core", type=int, help="processes per core, with several instances each")
    parser.add_argument("--no-template", action="store_true", help="start the processes without raypod's template")
    args = parser.parse_args()
    if args.per_core is not None and args.per_core < 1:
        parser.error(f"--per-core {args.per_core}: must be at least 1")
    receivers: Dict[str, Receive] = {"raypod": by_watch}
    if args.baseline:
        receivers["one message per wait"] = one_message_per_wait
    measured: Dict[Any, List[List[float]]] = {}
    with tempfile.TemporaryDirectory() as run_dir:
        placement = plan_of(1, 1, run_dir).placement
        session = RaySession(placement, start_bound=(_START_S, "start"), has_template=not args.no_template)
        try:
            actors = start(max(args.instances), args.per_core, session, run_dir)
            for _ in range(args.rounds):
                for instances in args.instances:
                    plan = plan_of(instances, args.calls, run_dir)
                    for name, receive in receivers.items():
                        row = measure(receive, plan, actors[:instances], args.interval)
                        measured.setdefault((name, instances), []).append(row)
        finally:
            print_table(measured)
            session.close()


def print_table(measured: Dict[Any, List[List[float]]]) -> None:
    """Print the medians of all rounds so far."""
    print("| receiver | instances | CPU of the thread | CPU of the process | wall | polls per call |")
    print("|---|---|---|---|---|---|")
    for (name, instances), rounds in sorted(measured.items()):
        columns = list(zip(*rounds))
        cells = " | ".join(f"{statistics.median(each):.0f} ({min(each):.0f} - {max(each):.0f})" for each in columns[:3])
        print(f"| {name} | {instances} | {cells} | {statistics.median(columns[3]):.1f} |", flush=True)


if __name__ == "__main__":
    main()
