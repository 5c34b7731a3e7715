"""What a launch costs: from the command to the first line of a trivial program, and the driver's time per output line.

    python scripts/bench_launch.py [--instances 4] [--rounds 3] [--lines 100000] [--horovodrun PATH]

The launch is compared with `horovodrun --gloo` where one is found, else with `mpirun`, else with a plain launcher that
starts as many processes. Ray's own start is measured by itself: `ray.init()` of a local session in a fresh process.
Medians of `--rounds` interleaved rounds; the machine should be quiet.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Dict, List, Optional, Tuple

from raypod.launcher.output import Console, Output
from raypod.launcher.records import STDOUT

PROGRAM = (sys.executable, "-c", "print('hello', flush=True)")
PLAIN = """
import subprocess, sys
started = [subprocess.Popen(sys.argv[2:]) for _ in range(int(sys.argv[1]))]
for each in started: each.wait()
"""
INIT = (
    "ray.init(address='local', include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False,"
    " logging_level='ERROR')"
)
RAY = f"""
import time
began = time.monotonic()
import ray
{INIT}
print(time.monotonic() - began, flush=True)
ray.shutdown()
"""
DRIVER = f"""
import os, sys, time
import ray
from raypod.launch import main
{INIT}
told = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
used = []
for count in (1, 1, int(sys.argv[1])):
    began = time.process_time()
    loop = f"for number in range({{count}}): print('a line of output, number', number)"
    assert main([sys.executable, "-c", loop]) == 0
    used.append(time.process_time() - began)
os.write(told, f"{{used[2] - used[1]}}\\n".encode())
ray.shutdown()
"""
ROOT = str(Path(__file__).resolve().parent.parent)


def environment() -> Dict[str, str]:
    """No running cluster is joined: each launch starts Ray by itself."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {**env, "PYTHONPATH": ROOT, "RAY_TMPDIR": tempfile.gettempdir() + "/raypod-bench"}


def first_line(command: List[str]) -> Tuple[float, str]:
    """Seconds until the command prints `hello` (or its first line), and all that it says."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env=environment()
        )
        assert process.stdout is not None
        said, seconds = "", 0.0
        for line in process.stdout:
            said += line
            if "hello" in line and not seconds:
                seconds = time.monotonic() - began
        if process.wait(120) or not seconds:
            raise SystemExit(f"{' '.join(command[:6])} failed: {said}")
        return seconds, said


def peer(instances: int, horovodrun: Optional[str]) -> Tuple[str, List[str]]:
    """The launcher to compare with, and its name."""
    found = horovodrun or shutil.which("horovodrun")
    if found:
        python = str(Path(found).parent / "python")
        return "horovodrun --gloo", [found, "--gloo", "-np", str(instances), python, *PROGRAM[1:]]
    found = shutil.which("mpirun")
    if found:
        return "mpirun", [found, "--allow-run-as-root", "--oversubscribe", "-np", str(instances), *PROGRAM]
    return "plain subprocesses", [sys.executable, "-c", PLAIN, str(instances), *PROGRAM]


def steps(said: str) -> Dict[str, float]:
    """Where a launch says that its time went (`-v`)."""
    return {what: float(seconds) for what, seconds in re.findall(r"(?:: |; )([a-zA-Z ]+): (\d+\.\d+) s", said)}


def ray_start() -> float:
    """Seconds of `import ray` and `ray.init()`."""
    done = subprocess.run([sys.executable, "-c", RAY], capture_output=True, text=True, env=environment(), check=True)
    return float(done.stdout.split()[-1])


def driver_s_per_line(lines: int) -> float:
    """CPU seconds of the driver for each line: what it does with reports of 64 KiB, log files and console included."""
    data = b"".join(b"a line of output, number %d\n" % number for number in range(lines))
    with tempfile.TemporaryDirectory() as folder:
        sink = os.open(f"{folder}/console", os.O_WRONLY | os.O_CREAT)
        output = Output(folder, 1, Console(sink, sink))
        began = time.process_time()
        for start in range(0, len(data), 1 << 16):
            output.add(0, STDOUT, data[start : start + (1 << 16)])
            output.flush()
        output.close()
        seconds = time.process_time() - began
        os.close(sink)
    return seconds / lines


def launch_s_per_line(lines: int) -> float:
    """CPU seconds of the launch's own process for each line, beyond those of a launch of one line; with Ray's part."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", DRIVER, str(lines)]
        done = subprocess.run(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1]) / lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--horovodrun", help="path of another environment's horovodrun")
    args = parser.parse_args()
    name, other = peer(args.instances, args.horovodrun)
    size = ["--num-replicas", str(args.instances), "--num-instances", str(args.instances)]
    ours = [sys.executable, "-m", "raypod.launch", "-v", *size, *PROGRAM]
    measured: Dict[str, List[float]] = {}
    note: Callable[[str, float], None] = lambda what, value: measured.setdefault(what, []).append(value)  # noqa: E731
    for _ in range(args.rounds):
        note(name, first_line(other)[0])
        note("Ray's own start", ray_start())
        seconds, said = first_line(ours)
        note("raypod.launch", seconds)
        for what, value in steps(said).items():
            note(f"  {what}", value)
    middle = {what: statistics.median(values) for what, values in measured.items()}
    told = sum(value for what, value in middle.items() if what.startswith("  "))
    middle["  interpreter, imports, first line"] = middle["raypod.launch"] - told
    print(f"\nfrom the command to the first line, {args.instances} instances, median of {args.rounds}")
    for what, value in middle.items():
        print(f"| {what:<40} | {value:7.2f} s |")
    bound = 1.5 * (middle[name] + middle["Ray's own start"])
    print(f"| {'1.5 x (' + name + ' + Ray)':<40} | {bound:7.2f} s |")
    print(f"\nthe driver, per line of {args.lines} lines")
    print(f"| {'console and log':<40} | {1e6 * driver_s_per_line(args.lines):7.2f} us |")
    print(f"| {'all of it, with Ray':<40} | {1e6 * launch_s_per_line(args.lines):7.2f} us |")


if __name__ == "__main__":
    main()
