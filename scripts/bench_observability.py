"""The cost of observing a run: of each update, of each poll of the status endpoint, and of both for a whole run.

    python scripts/bench_observability.py [--rounds 5] [--updates 300] [--fleet inline|ray] [--only costs|runs]

The first table has CPU times in one process with prepared events: the status and the event log handle the events of an
update, and the endpoint answers a poll (at most two per second are computed, whatever the number of clients).

The second table compares three kinds of the same run, interleaved: `off` without status, endpoint and event log (the
script replaces `Training._recorders`), `on` as usual, and `polled` while this process requests `/status` and `/metrics`
every second. With the inline fleet the coordinator, the endpoint and the instance share one interpreter, which is the
worst case. A ratio relates to `off` in the same round. The CPU time includes the start of the interpreter, and depends
less than the throughput on other load of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Tuple

from raypod.events import CallDone, CallTimes, HeartbeatReport, HostUsage, InstanceStarted, RunStarted, UpdateDone
from raypod.fleet.base import Beat
from raypod.host.files import strict_json
from raypod.plan.cluster import LOCAL
from raypod.plan.plan import make_plan
from raypod.plan.resolve import from_values
from raypod.record import run_state
from raypod.record.event_log import EventLog
from raypod.status import prometheus
from raypod.status.endpoint import TOKEN_FILE
from raypod.status.run_status import RunStatus
from raypod.status.token_server import read_token
from raypod.tasks.registry import facts_of

MODES = ("off", "on", "polled")
_UPDATES, _POLLS = 600, 20
_RUN_S = 120.0  # bound of one run


def costs(instances: int) -> List[float]:
    """Return microseconds per update of the status and the event log, and milliseconds per poll of both paths."""
    data = {"dataset": "synthetic", "samples": 100 * instances}
    training = {"batch_size": 1, "updates": 50, "epochs": 1}
    config = from_values(
        {"data": data, "training": training, "pod": {"replicas": instances, "num_instances": instances}}
    )
    now_s, numbers = time.monotonic(), random.Random(0)
    started = tuple(InstanceStarted(index, "h", 1, "emulated", "", 1, ()) for index in range(instances))
    usage = HostUsage(0.5, 1, 2, 3, 4, 5, 6)
    beats = {
        index: Beat(HeartbeatReport(index, "in call 3", 1.0, 1, 0.5, False, 1.0, None if index else usage), now_s)
        for index in range(instances)
    }
    events: List[Any] = [RunStarted("emulated", "", 0, 1, (), 1, started)]
    for update in range(_UPDATES):
        times = tuple(CallTimes(index, numbers.random(), 0.01, 0.01) for index in range(instances))
        events += [CallDone(update, (), times), UpdateDone(update + 1, 1, {"loss": 1.0, "accuracy": 2.0}, 1, 1.0, 1.0)]
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(config, LOCAL, facts_of(config), f"{folder}/run")
        status = RunStatus(plan, lambda: beats)
        with EventLog(Path(folder), {}) as log:
            handlers: List[Callable[[Any], None]] = [status.handle, log.handle]
            per_update = [1e6 * cpu_s(handle, events) / _UPDATES for handle in handlers]
        polls: List[Callable[[Any], Any]] = [
            lambda _: strict_json(status.snapshot()),
            lambda _: prometheus.scrape_response(status),
        ]
        return [*per_update, *(1e3 * cpu_s(poll, range(_POLLS)) / _POLLS for poll in polls)]


def cpu_s(function: Callable[[Any], Any], arguments: Iterable[Any]) -> float:
    """Return the CPU time of a call with each argument."""
    began_s = time.process_time()
    for argument in arguments:
        function(argument)
    return time.process_time() - began_s


def run(mode: str, folder: Path, flags: List[str]) -> int:
    """Run a training in this process; in the mode `off` only `state.json` records it."""
    from raypod import train
    from raypod.api import training

    def state_only(self: Any, fleet: Any, stack: contextlib.ExitStack) -> Iterator[Any]:
        yield stack.enter_context(run_state.StateFile(folder, self._run.plan.total_updates))

    if mode == "off":
        training.Training._recorders = state_only  # type: ignore[method-assign]
    return train.main([*flags, "--run-dir", str(folder)])


def measured(mode: str, flags: List[str]) -> Tuple[float, float]:
    """Run a training in a process of its own; return its throughput without the first call, and its CPU time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "run")
        command = [sys.executable, __file__, "--run", mode, "--folder", str(folder), *flags]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            deadline_s = time.monotonic() + _RUN_S
            while process.poll() is None:
                if time.monotonic() > deadline_s:
                    process.kill()
                    raise SystemExit(f"a run took more than {_RUN_S:g} s")
                if mode == "polled":
                    poll(folder)
                time.sleep(1.0 if mode == "polled" else 0.2)
        if process.returncode:
            raise SystemExit(f"a run ended with exit code {process.returncode}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return float(json.loads((folder / "summary.json").read_text())["samples_per_s"]), cpu


def poll(folder: Path) -> None:
    """Request both paths, if the endpoint is there."""
    state = run_state.read(folder)
    with contextlib.suppress(OSError):  # not yet, or not any more
        if state is not None and state.status_port is not None:
            header = {"Authorization": f"Bearer {read_token(folder / TOKEN_FILE)}"}
            for path in ("status", "metrics"):
                url = f"http://127.0.0.1:{state.status_port}/{path}"
                with urllib.request.urlopen(urllib.request.Request(url, headers=header), timeout=10) as response:
                    response.read()


def print_costs(instances: List[int], rounds: int) -> None:
    """Print the table of CPU times, medians of the rounds."""
    found: Dict[int, List[List[float]]] = {number: [] for number in instances}
    for _ in range(rounds):
        for number in instances:
            found[number].append(costs(number))
    print("| instances | status: µs per update | event log: µs per update | /status: ms per poll | /metrics: ms |")
    print("|---|---|---|---|---|")
    for number, each in found.items():
        update, log, status, metrics = (statistics.median(column) for column in zip(*each))
        print(f"| {number} | {update:.1f} | {log:.1f} | {status:.2f} | {metrics:.2f} |")


def print_runs(rounds: int, flags: List[str]) -> None:
    """Print the table of throughputs."""
    found: Dict[str, List[Tuple[float, float]]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for mode in MODES if number % 2 == 0 else reversed(MODES):
            found[mode].append(measured(mode, flags))
    print("| run | samples/s, median | smallest | largest | of off, median | smallest | largest | CPU time, of off |")
    print("|---|---|---|---|---|---|---|---|")
    for mode, runs in found.items():
        rates = [each[0] for each in runs]
        ratios, cpu_ratios = [
            [each[column] / off[column] for each, off in zip(runs, found["off"])] for column in (0, 1)
        ]
        spread = f"{statistics.median(rates):.0f} | {min(rates):.0f} | {max(rates):.0f}"
        of_off = f"{statistics.median(ratios):.4f} | {min(ratios):.3f} | {max(ratios):.3f}"
        print(f"| {mode} | {spread} | {of_off} | {statistics.median(cpu_ratios):.4f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--fleet", choices=["inline", "ray"], default="inline")
    parser.add_argument("--only", choices=["costs", "runs"])
    parser.add_argument("--run", choices=MODES, help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args, flags = parser.parse_known_args()
    if args.run:
        return run(args.run, args.folder, [*flags, "--updates", str(args.updates), "--fleet", args.fleet])
    if args.only != "runs":
        print_costs(args.instances, args.rounds)
    if args.only != "costs":
        instances = "1" if args.fleet == "inline" else "2"
        own = ["--updates", str(args.updates), "--fleet", args.fleet, "--replicas", "2", "--num-instances", instances]
        print_runs(args.rounds, [*own, "--epochs", "100", "--lr-schedule", "constant", *flags])
    return 0


if __name__ == "__main__":
    sys.exit(main())
