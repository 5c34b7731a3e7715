"""Make the pictures of docs/images from a real training: `python scripts/make_pictures.py [--runs FOLDER]`.

Two runs are made: one with four instances under Ray, of which one is killed, and one in a single process. The pictures
are those of the report, of the monitor and of the dashboard. With `--runs`, the pictures are made of the runs `faults`
and `inline` of an earlier call, whose folder is printed. Needs Chromium.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

from browser import Browser, Page, find_chromium  # noqa: E402 - the checkout's own

from raypod.__main__ import COMMANDS  # noqa: E402
from raypod.runs import run_state  # noqa: E402
from raypod.runs.growing_file import parse_records  # noqa: E402

IMAGES = ROOT / "docs" / "images"
MAX_BYTES = 300_000
WIDTH, DASHBOARD_WIDTH = 1180, 1400  # in CSS pixels; the dashboard lists the runs beside the report from 1200 on
RUN_LIMIT_S = 900.0
KILL_AFTER, KILLED = 150, 2  # updates; instance
FLAGS = ["--epochs", "12", "--evaluate-every", "2", "--device", "emulated"]


def main() -> int:
    """Make the runs and the pictures; return 2 with one line if something is missing."""
    parser = argparse.ArgumentParser(description="Make the pictures of docs/images from a real training.")
    parser.add_argument("--runs", metavar="FOLDER", type=Path, help="use the runs of an earlier call")
    args = parser.parse_args()
    chromium = find_chromium()
    if chromium is None:
        print("make_pictures: error: no Chromium is installed (apt-get install chromium)", file=sys.stderr)
        return 2
    folder = args.runs or Path(tempfile.mkdtemp(prefix="raypod-pictures-"))
    if args.runs is None:
        make_runs(folder)
        print(f"Runs: {folder}")
    IMAGES.mkdir(parents=True, exist_ok=True)
    with Browser(chromium) as browser:
        report_pictures(browser, folder)
        dashboard_picture(browser, folder)
    monitor_pictures(folder)
    for path in sorted(IMAGES.iterdir()):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")
    return 0


def make_runs(folder: Path) -> None:
    """Train with four instances, of which one is killed, and in one process."""
    train = [sys.executable, "-m", "raypod.train", *FLAGS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    flags = ["--num-instances", "4", "--replicas", "4", "--run-dir", str(folder / "faults")]
    with subprocess.Popen([*train, *flags], env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            wait_for_update(folder / "faults", KILL_AFTER, process)
            os.kill(pid_of(folder / "faults", KILLED), signal.SIGKILL)
            wait_for_update(folder / "faults", KILL_AFTER + 100, process)
            command = [sys.executable, "-m", "raypod", "monitor", "--json"]
            content = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=60).stdout
            (folder / "monitor.json").write_bytes(content)
            process.wait(RUN_LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
    flags = ["--fleet", "inline", "--num-instances", "1", "--replicas", "4", "--learning-rate", "0.02"]
    command = [*train, *flags, "--run-dir", str(folder / "inline")]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True, timeout=RUN_LIMIT_S)


def wait_for_update(folder: Path, update: int, process: subprocess.Popen[Any]) -> None:
    """Wait until a run has done some updates. RuntimeError if its process ends before."""
    deadline = time.monotonic() + RUN_LIMIT_S
    while True:
        state = run_state.read(folder)
        if state is not None and state.update >= update:
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run in {folder} did not reach update {update}")
        time.sleep(0.2)


def pid_of(folder: Path, instance: int) -> int:
    """Return the pid of an instance."""
    started = [
        each
        for each in parse_records((folder / "events.jsonl").read_bytes().splitlines())
        if each["event"] == "run_started"
    ]
    return int(next(each["pid"] for each in started[-1]["instances"] if each["instance"] == instance))


def report_pictures(browser: Browser, folder: Path) -> None:
    """Make the pictures of the report of the run with the fault, and of both runs in dark colours."""
    page = folder / "report.html"
    command = [sys.executable, "-m", "raypod", "report", "--output", str(page)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, str(folder / "faults")], env=environment, check=True, timeout=120)
    with browser.page(width=WIDTH) as tab:
        load(tab, page.as_uri())
        write(tab, "report.png", first="#report > header", last="#throughput")
        write(tab, "report-instances.png", first="#instances")
        write(tab, "report-timeline.png", first="#timeline", last="#startup")
    both = [str(folder / "faults"), str(folder / "inline")]
    subprocess.run([*command, *both], env=environment, check=True, timeout=120)
    with browser.page(width=WIDTH, dark=True) as tab:
        load(tab, page.as_uri())
        write(tab, "report-compare.png", first="#report > header", last="#curves")


def dashboard_picture(browser: Browser, folder: Path) -> None:
    """Make the picture of the dashboard of both runs."""
    if "dashboard" not in COMMANDS:
        return
    command = [sys.executable, "-u", "-m", "raypod", "dashboard", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, universal_newlines=True) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            address = next(word for word in line.split() if word.startswith("http://"))
            with browser.page(width=DASHBOARD_WIDTH) as tab:
                load(tab, address)
                tab.wait_for("raypodReport.charts.size > 0")
                write(tab, "dashboard.png", height=900, width=DASHBOARD_WIDTH)
        finally:
            process.send_signal(signal.SIGINT)


def monitor_pictures(folder: Path) -> None:
    """Make the pictures of the monitor from what it printed during the run."""
    import pictures_monitor

    content: Dict[str, Any] = json.loads((folder / "monitor.json").read_text())
    pictures_monitor.make_pictures(content, IMAGES)


def load(tab: Page, address: str) -> None:
    """Load a report, and fail if the page has an error."""
    tab.open(address)
    tab.wait_for("window.raypodReport && raypodReport.ready")
    assert not tab.errors, tab.errors


def write(
    tab: Page,
    name: str,
    first: str = "body",
    last: Optional[str] = None,
    height: Optional[int] = None,
    width: int = WIDTH,
) -> None:
    """Write the picture of the elements from `first` to `last`, or of `height` pixels from `first` on."""
    path = IMAGES / name
    edges: List[float] = tab.run(
        f"[document.querySelector({json.dumps(first)}).getBoundingClientRect().top + scrollY,"
        f" document.querySelector({json.dumps(last or first)}).getBoundingClientRect().bottom + scrollY]"
    )
    top = max(0.0, edges[0] - 10)
    tab.picture(path, clip=(0, top, width, height or edges[1] - top + 10))
    assert path.stat().st_size < MAX_BYTES, f"{path} has {path.stat().st_size} bytes"


if __name__ == "__main__":
    sys.exit(main())
