"""Measure a launch: the time from the command to the first output line, and the CPU time per output line.

    python scripts/bench_launch.py [--instances 4] [--rounds 3] [--lines 100000] [--horovodrun PATH]

The baseline is `horovodrun --gloo` if installed, else `mpirun`, else plain subprocesses. The start of Ray is measured
separately: `import ray` and `ray.init()` of a local session in a new process, without the start of the interpreter.
Prints medians of `--rounds` interleaved rounds; run it on an idle machine.
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

from raypod.runtime.launcher.output import Console, Output
from raypod.runtime.launcher.records import STDOUT

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
stdout = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
used = []
for count in (1, 1, int(sys.argv[1])):
    began = time.process_time()
    loop = f"for number in range({{count}}): print('a line of output, number', number)"
    assert main([sys.executable, "-c", loop]) == 0
    used.append(time.process_time() - began)
os.write(stdout, f"{{used[2] - used[1]}}\\n".encode())
ray.shutdown()
"""
ROOT = str(Path(__file__).resolve().parent.parent)


def environment() -> Dict[str, str]:
    """Return an environment in which each launch starts its own Ray instead of joining a cluster."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {**env, "PYTHONPATH": ROOT, "RAY_TMPDIR": tempfile.gettempdir() + "/raypod-bench"}


def first_line(command: List[str]) -> Tuple[float, str]:
    """Return the seconds until the command prints `hello`, and its output."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env=environment()
        )
        assert process.stdout is not None
        output, seconds = "", 0.0
        for line in process.stdout:
            output += line
            if "hello" in line and not seconds:
                seconds = time.monotonic() - began
        if process.wait(120) or not seconds:
            raise SystemExit(f"{' '.join(command[:6])} failed: {output}")
        return seconds, output


def baseline(instances: int, horovodrun: Optional[str]) -> Tuple[str, List[str]]:
    """Return the name and command of the baseline."""
    found = horovodrun or shutil.which("horovodrun")
    if found:
        python = str(Path(found).parent / "python")
        return "horovodrun --gloo", [found, "--gloo", "-np", str(instances), python, *PROGRAM[1:]]
    found = shutil.which("mpirun")
    if found:
        return "mpirun", [found, "--allow-run-as-root", "--oversubscribe", "-np", str(instances), *PROGRAM]
    return "plain subprocesses", [sys.executable, "-c", PLAIN, str(instances), *PROGRAM]


def step_seconds(output: str) -> Dict[str, float]:
    """Parse the start-up steps and their seconds from the output of `-v`."""
    return {what: float(seconds) for what, seconds in re.findall(r"(?:: |; )([a-zA-Z ]+): (\d+\.\d+) s", output)}


def ray_start() -> float:
    """Return the seconds of `import ray` and `ray.init()`."""
    done = subprocess.run([sys.executable, "-c", RAY], capture_output=True, text=True, env=environment(), check=True)
    return float(done.stdout.split()[-1])


def driver_s_per_line(lines: int) -> float:
    """Return CPU seconds per line of log files and console, with reports of 64 KiB."""
    data = b"".join(b"a line of output, number %d\n" % number for number in range(lines))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "logs").mkdir()
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
    """Return CPU seconds per line of the launching process, Ray included, beyond those of a launch of one line."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", DRIVER, str(lines)]
        done = subprocess.run(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1]) / lines


def main() -> None:
    """Run the measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--horovodrun", help="path of another environment's horovodrun")
    args = parser.parse_args()
    name, other = baseline(args.instances, args.horovodrun)
    size = ["--num-replicas", str(args.instances), "--num-instances", str(args.instances)]
    ours = [sys.executable, "-m", "raypod.launch", "-v", *size, *PROGRAM]
    measured: Dict[str, List[float]] = {}
    add: Callable[[str, float], None] = lambda what, value: measured.setdefault(what, []).append(value)  # noqa: E731
    for _ in range(args.rounds):
        add(name, first_line(other)[0])
        add("Ray's own start", ray_start())
        seconds, output = first_line(ours)
        add("raypod.launch", seconds)
        for what, value in step_seconds(output).items():
            add(f"  {what}", value)
    medians = {what: statistics.median(values) for what, values in measured.items()}
    steps = sum(value for what, value in medians.items() if what.startswith("  "))
    medians["  interpreter, imports, first line"] = medians["raypod.launch"] - steps
    own = measured["Ray's own start"]
    more_s = statistics.median(a - b for a, b in zip(measured["raypod.launch"], own))
    print(f"\nfrom the command to the first line, {args.instances} instances: median of {args.rounds} (least - most)")
    print("| what | s | beyond Ray's own start, s | target |\n|---|---|---|---|")
    for what, value in medians.items():
        values = measured.get(what, [value])
        beyond = f"{more_s:+.2f} | <= +0.20" if what == "raypod.launch" else "|"
        print(f"| {what:<40} | {value:.2f} ({min(values):.2f} - {max(values):.2f}) | {beyond} |")
    print(f"\nCPU time of the driver, per line of {args.lines} lines")
    print(f"| {'console and log':<40} | {1e6 * driver_s_per_line(args.lines):7.2f} us |")
    print(f"| {'total, with Ray':<40} | {1e6 * launch_s_per_line(args.lines):7.2f} us |")


if __name__ == "__main__":
    main()
