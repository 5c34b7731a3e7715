"""The time that a run is interrupted by a killed instance: `python scripts/bench_recovery.py [--rounds 3]`.

Two processes train a small ResNet on 8x8 images, 16 samples each; one is killed (SIGKILL). Measured are the seconds
from there to the first update that had not been done before, and to the first one to which both contribute; the samples
of the data order before that one which no update has used; and the updates that are repeated:

* raypod: 2 instances; the lost one is replaced, the other keeps its process and its state. Samples and updates are
  those of the ledger, which has to prove the run;
* raypod with `--standby 1`: the same, and a process with SDK and data loaded takes the place of the lost one;
* Ray Train: TorchTrainer with max_failures, DDP over gloo; all workers restart from the last checkpoint, which is
  written every 50 updates;
* torchft: two replica groups of one process, DDP over gloo. The other one trains alone, and this script starts the dead
  process again at once, as a supervisor does; it continues in its part of the data where it was. The lighthouse has the
  options of torchft's README, and takes a group for dead after 1 s without heartbeats, which it gets every 0.1 s: with
  the default, 5 s, no process trains for 5 s.

Rounds are interleaved. A peer that is not installed is skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, TypeVar

from bench_train import spread

ROOT = Path(__file__).resolve().parent.parent
PEER, TORCHFT = (str(ROOT / "scripts" / f"bench_recovery_{name}.py") for name in ("peer", "torchft"))
PATH = ":".join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH}
KILL_AFTER = 120  # updates
LIMIT_S = 240.0
PREPARE_S = 15.0  # after the first update, for a standby to be prepared
BATCH = 16  # samples of each process
GOAL = 0.22
LIGHTHOUSE = ("--min_replicas=1", "--quorum_tick_ms=100", "--join_timeout_ms=10000", "--heartbeat_timeout_ms=1000")

T = TypeVar("T")


class Result(NamedTuple):
    """What a kill costs."""

    next_s: float  # to the next update
    whole_s: float  # to the first update of both processes
    skipped: int  # samples
    repeated: int  # updates


class Line(NamedTuple):
    """An update of a process of a peer, with the `position`-th batch of the process's part of the data order."""

    rank: int
    update: int
    pid: int
    seconds: float
    position: int
    processes: int  # that contributed to the update


def raypod(standby: int) -> Result:
    """Measure raypod, from its events and its ledger."""
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-c", RAYPOD, f"{folder}/run", str(KILL_AFTER), str(standby), str(PREPARE_S)]
        done = subprocess.run(program, env=ENV, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        found = json.loads(done.stdout.splitlines()[-1])
        return Result(found["seconds"], found["seconds"], found["skipped"], found["repeated"])


RAYPOD = f"""
import contextlib, json, os, signal, sys, time
from pathlib import Path
from raypod.runtime.coordinator import coordinator
from raypod.runs import ledger, run_folder, verify_data
from raypod.plan.cluster import LOCAL
from raypod.plan.resolve import from_values
from raypod.training.tasks.registry import facts_of
from raypod.events import Repaired, UpdateDone
from raypod.runtime.workers.ray import RayFleet
from raypod.runs.metrics import MetricsAggregator
from raypod.plan.plan import make_plan

training = dict(batch_size={BATCH}, epochs=1000, lr_schedule="constant", updates=40000)
pod = dict(replicas=2, num_instances=2)
standby, prepare_s = int(sys.argv[3]), float(sys.argv[4])
config = from_values(dict(run=dict(device="emulated", standby=standby), training=training, pod=pod))
plan = make_plan(config, LOCAL, facts_of(config), sys.argv[1])
run_folder.create(plan)
killed_s = repaired = first_s = None
events = coordinator.run(plan, RayFleet(plan), MetricsAggregator(plan, 0.0))
with contextlib.closing(ledger.Ledger(plan)) as record, contextlib.closing(events):
    for event in events:
        record.on_event(event)
        if isinstance(event, Repaired):
            repaired = event
        elif isinstance(event, UpdateDone):
            first_s = first_s or time.monotonic()
            is_prepared = not standby or time.monotonic() > first_s + prepare_s
            if killed_s is None and event.update >= int(sys.argv[2]) and is_prepared:
                text = Path(plan.log_file(1)).read_text()
                os.kill(int(text.rpartition(", pid ")[2].partition(":")[0]), signal.SIGKILL)
                killed_s = time.monotonic()
            elif repaired is not None and event.update > repaired.update:
                seconds = time.monotonic() - killed_s
                break
verdict = verify_data.verify(Path(plan.run_dir))
assert verdict.is_proved, verdict.lines
calls = [line for line in ledger.read(Path(plan.run_dir, "ledger.jsonl"))[0] if isinstance(line, ledger.CallRecord)]
used = {{(call.epoch, call.position): call.count for call in calls}}
epoch, position = max(used)
end = epoch * verify_data.order_of(Path(plan.run_dir)).samples_per_epoch + position + used[epoch, position]
repeated = len(calls) - len({{call.update for call in calls}})
print(json.dumps(dict(seconds=seconds, skipped=end - sum(used.values()), repeated=repeated)))
"""


def ray_train() -> Result:
    """Measure Ray Train, which replaces all of its processes."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        file = Path(folder, "updates")
        command = (sys.executable, PEER, "--file", str(file), "--folder", folder, "--batch", str(BATCH))
        trainer = stack.enter_context(_process(file, *command))
        return _measure(file, [trainer], lambda: {line.pid for line in lines_of(file)})


def torchft() -> Result:
    """Measure torchft, whose dead process is started again."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
        file = Path(folder, "updates")
        command = (sys.executable, TORCHFT, "--file", str(file), "--lighthouse", f"http://{address}")
        lighthouse = str(Path(sys.executable).with_name("torchft_lighthouse"))
        processes = [stack.enter_context(_process(file, lighthouse, "--bind", address, *LIGHTHOUSE))]

        def start(group: int) -> None:
            started = _process(file, *command, "--batch", str(BATCH), "--group", str(group))
            processes.append(stack.enter_context(started))

        def replace() -> Set[int]:
            lost = processes.pop()
            start(1)
            return {lost.pid}

        start(0)
        start(1)
        return _measure(file, processes, replace)


@contextlib.contextmanager
def _process(file: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process of a peer, which writes to `file`, and its output beside it; end it."""
    with file.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(command, env=ENV, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _measure(file: Path, processes: List[subprocess.Popen[bytes]], replace: Callable[[], Set[int]]) -> Result:
    """Kill rank 1 of a peer; `replace` is called then, and returns the processes that do not go on."""

    def find_victim(lines: List[Line]) -> Optional[int]:
        return next((line.pid for line in lines if line.rank == 1 and line.update >= KILL_AFTER), None)

    os.kill(_wait(file, processes, find_victim), signal.SIGKILL)
    killed_s = time.monotonic()
    ended = replace()

    whole = _wait(file, processes, lambda lines: find_whole(lines, ended))
    return result_of(lines_of(file), killed_s, whole)


def find_whole(lines: List[Line], ended: Set[int]) -> Optional[int]:
    """Return the first update of both processes after those that the `ended` ones have done; None if there is none."""
    done = max(line.update for line in lines if line.pid in ended)
    new = [line for line in lines if line.update > done and line.pid not in ended]
    both = ({line.update for line in new if line.rank == rank} for rank in (0, 1))
    return min(set.intersection(*both), default=None)


def result_of(lines: List[Line], killed_s: float, whole: int) -> Result:
    """Return what the kill cost up to update `whole`."""
    # A survivor may end the update in which it was with the victim: that is no recovery.
    alone = [line.seconds for line in lines if line.processes == 1 and line.seconds > killed_s]
    done_s = [line.seconds for line in lines if line.update == whole]
    before = min(max(line.update for line in lines if line.rank == rank and line.seconds < killed_s) for rank in (0, 1))
    updates = [line.update for line in lines if line.rank == 0]
    skipped, repeated = _unused(lines, whole) - _unused(lines, before), len(updates) - len(set(updates))
    return Result(min(alone + done_s) - killed_s, max(done_s) - killed_s, skipped, repeated)


def _unused(lines: List[Line], update: int) -> int:
    """Return how many samples before the last used one of the data order no update up to this one has used."""
    used = [{line.position for line in lines if line.rank == rank and line.update <= update} for rank in (0, 1)]
    return sum(1 + max(set.union(*used)) - len(positions) for positions in used) * BATCH


def lines_of(file: Path) -> List[Line]:
    """Return the lines of a file that the processes of a peer write."""
    texts = file.read_text().splitlines(keepends=True) if file.is_file() else []
    fields = (text.split() for text in texts if text.endswith("\n"))
    return [
        Line(int(rank), int(update), int(pid), float(seconds), int(position), int(processes))
        for rank, update, pid, seconds, position, processes in fields
    ]


def _wait(file: Path, processes: List[subprocess.Popen[bytes]], find: Callable[[List[Line]], Optional[T]]) -> T:
    """Wait until `find` finds something in the lines of a peer; return it."""
    deadline = time.monotonic() + LIMIT_S
    while (found := find(lines_of(file))) is None:
        if any(process.poll() is not None for process in processes) or time.monotonic() > deadline:
            log = file.with_suffix(".log").read_text()
            raise RuntimeError(f"a process has ended, or did not do an update within {LIMIT_S:g} s: {log}")
        time.sleep(0.05)
    return found


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    measured: Dict[str, Callable[[], Result]] = {}
    for name, (measure, packages) in PEERS.items():
        if all(importlib.util.find_spec(module) for module in packages):
            measured[name] = measure
        else:
            print(f"skipped: {name}, which needs pip install {' '.join(packages.values())}")
    peers = list(measured)
    measured.update({"raypod": lambda: raypod(0), "raypod --standby 1": lambda: raypod(1)})
    found: Dict[str, List[Result]] = {name: [] for name in measured}
    for number in range(rounds):
        for name, measure in measured.items():
            found[name].append(measure())
        line = ", ".join(f"{name} {results[-1].whole_s:.1f} s" for name, results in found.items())
        print(f"round {number + 1}: {line}", flush=True)
    columns = ["s to the next update", "s until both train", *(f"of {peer}" for peer in peers)]
    print(f"\n| | {' | '.join(columns)} | samples skipped | updates repeated |\n|{'---|' * (len(columns) + 3)}")
    ones = [1.0] * rounds
    for name, results in found.items():
        next_s, whole_s, skipped, repeated = zip(*results)
        ratios = (spread(whole_s, [result.whole_s for result in found[peer]]) for peer in peers)
        cells = [name, spread(next_s, ones), spread(whole_s, ones), *ratios, _range(skipped), _range(repeated)]
        print(f"| {' | '.join(cells)} |")
    print(f"\ngoal: at most {GOAL} of Ray Train, no sample skipped, and no update repeated")


def _range(values: Sequence[int]) -> str:
    return f"{min(values)} - {max(values)}" if len(set(values)) > 1 else str(values[0])


PEERS = {  # what measures them, and the packages that they need, by module
    "Ray Train": (ray_train, {"pyarrow": "pyarrow", "pandas": "pandas"}),
    "torchft": (torchft, {"torchft": "torchft-nightly"}),
}

if __name__ == "__main__":
    main()
