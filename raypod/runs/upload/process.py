"""The process that mirrors a run: `python -m raypod.runs.upload.process RUN URL`, started by `mirror.py`, or by hand.

It compares the run folder with the storage and uploads what is missing, so it can be killed and started at any time.
Lines of standard input name checkpoints that were saved; its end is the end of the run, or of the coordinator. From
then on the process has a limited time.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
import traceback
import uuid
from pathlib import Path

from raypod.errors import ConfigError
from raypod.plan import layout
from raypod.plan.metric import Metric
from raypod.runs.upload.run_mirror import RunMirror
from raypod.system.command_line import show
from raypod.system.companion import NOT_AGAIN, attending
from raypod.system.remote.backends import check_scheme
from raypod.system.remote.errors import secrets
from raypod.system.remote.store import Store
from raypod.system.urls import check_url
from raypod.training.checkpoint.format import Retention

NICE = 19  # the run goes first
STALLED = 75  # exit code of a process whose storage library hangs; the coordinator starts it again
_STALL_S = 900.0  # without progress; the longest time between two signs of it is that of a part at 0.1 Mbit/s
_WATCH_S = 5.0
_MANUAL_S = 3600.0  # if a person starts this process
_LOCK = "storage.lock"


def watch(store: Store) -> None:
    """End this process if the storage library hangs."""
    while time.monotonic() - store.progress_s < _STALL_S or not store.is_busy:
        time.sleep(_WATCH_S)
    show(f"no progress for {_STALL_S:g} s: the process ends", sys.stderr)
    time.sleep(1.0)  # for the thread that redacts the output
    os._exit(STALLED)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="raypod.runs.upload.process", description="Mirror a run folder to a storage.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("url", help="of the folder of all runs, as --storage-path")
    parser.add_argument("--keep", type=int, default=3, help="newest checkpoints to keep on the storage [3]")
    parser.add_argument("--metric", default="loss", help="the best checkpoint by this metric is kept, too [loss]")
    parser.add_argument("--better", choices=["lower", "higher"], default="lower")
    parser.add_argument("--timeout-s", type=float, default=_MANUAL_S)
    parser.add_argument("--writer", default=uuid.uuid4().hex, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not (args.run_dir / layout.CONFIG).is_file():
        parser.error(f"{args.run_dir} has no {layout.CONFIG}; is it a run folder?")
    try:
        args.url = check_url(args.url, "URL")
        check_scheme(args.url, "URL")
    except ConfigError as error:
        parser.error(str(error))
    return args


def main() -> int:
    """Mirror a run until it ends; return 0 once everything is on the storage."""
    os.nice(NICE)
    args = _arguments()
    run_dir = args.run_dir.resolve()
    store = Store(f"{args.url}/{run_dir.name}")
    kept = Retention(args.keep, Metric(args.metric, args.better))
    with attending(run_dir, run_dir / _LOCK, args.timeout_s, "run.storage_timeout_s", secrets()) as entered:
        threading.Thread(target=watch, args=(store,), name="watch", daemon=True).start()
        try:
            mirror = RunMirror(run_dir, store, kept, args.writer)
            return 0 if mirror.follow(entered) else NOT_AGAIN if mirror.is_taken else 1
        except Exception:  # noqa: BLE001 - its text goes through the redaction
            traceback.print_exc()
            return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of a storage library must not delay the end
