"""The cost of observing a run: of each update, of each poll of the status endpoint, and of both for a whole run.

    python scripts/bench_observability.py [--rounds 5] [--updates 300] [--fleet inline|ray] [--only costs|runs|blocks]

The first table has CPU times in one process with prepared events: the status and the event log handle the events of an
update, and the endpoint answers a poll (at most two per second are computed, whatever the number of clients).

The second table compares three kinds of the same run, interleaved: `off` without status, endpoint and event log (the
script replaces `Training._recorders`), `on` as usual, and `polled` while this process requests `/status` and `/metrics`
every second. With the inline fleet the coordinator, the endpoint and the instance share one interpreter, which is the
worst case. A ratio relates to `off` in the same round. The CPU time includes the start of the interpreter, and depends
less than the throughput on other load of the machine.

The third table is exact enough for shares of a percent. Within one run, the status and the event log handle only every
other block of 10 updates: `on/off - 1` compares the medians of the durations of blocks, and `handlers` is the time in
the handlers, less the time of handlers that do nothing, as a share of the time of these updates. A client requests both
paths every second; `/status` and `/metrics` are the CPU time of the answers as a share of the time of the run.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
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
from raypod.observe.status import prometheus
from raypod.observe.status.run_status import RunStatus
from raypod.observe.status.token_server import read_token
from raypod.plan.cluster import LOCAL
from raypod.plan.layout import TOKEN_FILE
from raypod.plan.plan import make_plan
from raypod.plan.resolve import from_values
from raypod.runs import run_state
from raypod.runs.event_log import EventLog
from raypod.runs.run_view import RunView
from raypod.runtime.workers.fleet import Beat
from raypod.system.files import strict_json
from raypod.training.tasks.registry import facts_of

MODES = ("off", "on", "polled")
BLOCKS = "blocks"
_UPDATES, _POLLS = 600, 20
_BLOCK = 10  # updates
_RESULT = "blocks.json"  # beside the run folder
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
            handlers: List[Callable[[Any], None]] = [status.on_event, log.on_event]
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

    def state_only(self: Any, fleet: Any, status: Any, stack: contextlib.ExitStack, parts: Any) -> Iterator[Any]:
        self._view = RunView(self._run.plan)
        yield stack.enter_context(run_state.StateFile(folder, self._view))

    if mode == "off":
        training.Training._recorders = state_only  # type: ignore[method-assign]
    return train.main([*flags, "--run-dir", str(folder)])


class Blocks:
    """Lets the status and the event log handle every other block of updates, and measures all of them."""

    def __init__(self) -> None:
        # By whether the updates are handled.
        self.blocks_s: Dict[bool, List[float]] = {True: [], False: []}
        self.handlers_s: Dict[bool, float] = {True: 0.0, False: 0.0}
        self.answers_s = {"/status": 0.0, "/metrics": 0.0}  # CPU time of the threads that answer requests
        self._updates, self._began_s = 0, 0.0

    def install(self) -> None:
        """Replace the methods."""
        for recorder in (RunStatus, EventLog):
            recorder.on_event = self._in_every_other_block(recorder.on_event)  # type: ignore[method-assign,assignment]
        answer = http.server.BaseHTTPRequestHandler.handle

        def measured_answer(handler: Any) -> None:
            began_s = time.thread_time()
            answer(handler)
            self.answers_s[handler.path] += time.thread_time() - began_s

        http.server.BaseHTTPRequestHandler.handle = measured_answer  # type: ignore[method-assign,assignment]

    def _in_every_other_block(self, handle: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def handle_some(recorder: Any, event: Any) -> None:
            if not isinstance(event, (CallDone, UpdateDone)):
                handle(recorder, event)
                return
            is_handled, began_s = self._is_handled, time.perf_counter()
            (handle if is_handled else _do_nothing)(recorder, event)
            self.handlers_s[is_handled] += time.perf_counter() - began_s

        return handle_some

    @property
    def _is_handled(self) -> bool:
        return self._updates // _BLOCK % 2 == 0

    def measure(self, event: Any) -> None:
        """Count the duration of a block, which ends with this event; the first one includes the compilation."""
        if isinstance(event, UpdateDone):
            was_handled, now_s = self._is_handled, time.perf_counter()
            self._updates += 1
            if self._updates % _BLOCK == 0:
                if self._updates > _BLOCK:
                    self.blocks_s[was_handled].append(now_s - self._began_s)
                self._began_s = now_s

    def result(self) -> List[float]:
        """Return the number of updates, the medians in ms with and without, and shares of the time of the run."""
        on_s, off_s = self.blocks_s[True], self.blocks_s[False]
        total_s = sum(on_s) + sum(off_s)
        handlers = (self.handlers_s[True] - self.handlers_s[False]) / sum(on_s)
        answers = [self.answers_s[path] / total_s for path in ("/status", "/metrics")]
        on_ms, off_ms = (1e3 * statistics.median(each) / _BLOCK for each in (on_s, off_s))
        return [_BLOCK * (len(on_s) + len(off_s)), on_ms, off_ms, on_ms / off_ms - 1, handlers, *answers]


def _do_nothing(recorder: Any, event: Any) -> None:
    """Stand in for a handler."""


def run_blocks(folder: Path, flags: List[str]) -> int:
    """Run a training in this process, and write the result of the blocks beside its folder."""
    from raypod import train
    from raypod.api import training

    blocks = Blocks()
    blocks.install()
    record = training.Training._record

    def measured_record(self: Any, event: Any) -> None:
        record(self, event)
        blocks.measure(event)

    training.Training._record = measured_record  # type: ignore[method-assign]
    code = train.main([*flags, "--run-dir", str(folder)])
    folder.with_name(_RESULT).write_text(json.dumps(blocks.result()))
    return code


@contextlib.contextmanager
def finished_run(mode: str, flags: List[str]) -> Iterator[Path]:
    """Run a training in a process of its own; yield its folder."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "run")
        command = [sys.executable, __file__, "--run", mode, "--folder", str(folder), *flags]
        is_polled = mode in ("polled", BLOCKS)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            deadline_s = time.monotonic() + _RUN_S
            while process.poll() is None:
                if time.monotonic() > deadline_s:
                    process.kill()
                    raise SystemExit(f"a run took more than {_RUN_S:g} s")
                if is_polled:
                    poll(folder)
                time.sleep(1.0 if is_polled else 0.2)
        if process.returncode:
            raise SystemExit(f"a run ended with exit code {process.returncode}")
        yield folder


def measured(mode: str, flags: List[str]) -> Tuple[float, float]:
    """Run a training; return its throughput without the first call, and its CPU time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with finished_run(mode, flags) as folder:
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


def print_blocks(rounds: int, flags: List[str]) -> None:
    """Print the table of what the status, the event log and the answers cost within a run."""
    print("| round | updates | ms per update, on | off | on/off - 1 | handlers | /status | /metrics |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for _ in range(rounds):
        with finished_run(BLOCKS, flags) as folder:
            rows.append(json.loads(folder.with_name(_RESULT).read_text()))
        print(f"| {len(rows)} | {_cells(*rows[-1])}", flush=True)
    print(f"| median | {_cells(*(statistics.median(column) for column in zip(*rows)))}")


def _cells(updates: float, on_ms: float, off_ms: float, *shares: float) -> str:
    return f"{updates:.0f} | {on_ms:.3f} | {off_ms:.3f} | {' | '.join(f'{share:+.2%}' for share in shares)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--fleet", choices=["inline", "ray"], default="inline")
    parser.add_argument("--only", choices=["costs", "runs", BLOCKS])
    parser.add_argument("--run", choices=[*MODES, BLOCKS], help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args, flags = parser.parse_known_args()
    own = ["--updates", str(args.updates), "--fleet", args.fleet]
    if args.run == BLOCKS:
        return run_blocks(args.folder, [*flags, *own])
    if args.run:
        return run(args.run, args.folder, [*flags, *own])
    instances = "1" if args.fleet == "inline" else "2"
    flags = [
        *own,
        "--replicas",
        "2",
        "--num-instances",
        instances,
        "--epochs",
        "100",
        "--lr-schedule",
        "constant",
        *flags,
    ]
    if args.only in (None, "costs"):
        print_costs(args.instances, args.rounds)
    if args.only in (None, "runs"):
        print_runs(args.rounds, flags)
    if args.only in (None, BLOCKS):
        print_blocks(args.rounds, flags)
    return 0


if __name__ == "__main__":
    sys.exit(main())
