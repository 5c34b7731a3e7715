"""Run folders as a run writes them, for the tests of `raypod logs`."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

from raypod.host.process import process_start_ticks
from raypod.plan.cluster import LOCAL, Cluster
from raypod.record import run_state
from raypod.record.run_state import RunState


class RunFolder:
    """A run with two instances whose coordinator is this process."""

    def __init__(
        self, path: Path, instances: int = 2, cluster: Cluster = LOCAL, run_dir: Optional[Path] = None
    ) -> None:
        """`run_dir` is the path of the folder on the hosts."""
        self.path = path
        (path / "logs").mkdir(parents=True)
        plan = {
            "cluster": dataclasses.asdict(cluster),
            "instances": [{"index": index} for index in range(2)],
            "run_dir": str(run_dir or path),
        }
        (path / "plan.json").write_text(json.dumps(plan))

    def log(self, instance: int, text: str, at_s: Optional[float] = None, marked: bool = True) -> Path:
        """Append to the log of an instance at a time, and mark it."""
        path = self.path / "logs" / f"instance-{instance}.log"
        append(path, text, at_s, marked)
        return path

    def event(self, unix_s: float, event: str, **fields: Any) -> None:
        """Append an event."""
        with (self.path / "events.jsonl").open("a") as file:
            file.write(json.dumps({"unix_s": unix_s, "event": event, **fields}) + "\n")

    def placed(self, unix_s: float, event: str, hosts: Sequence[str], pids: Sequence[int]) -> None:
        """Append an event that names the processes of all instances."""
        processes: Sequence[Dict[str, Any]] = [
            {"instance": index, "host": host, "pid": pid} for index, (host, pid) in enumerate(zip(hosts, pids))
        ]
        self.event(unix_s, event, instances=processes)

    def state(self, exit_code: Optional[int] = None) -> None:
        """Write `state.json` of a run that runs in this process, or that has ended in another one."""
        ticks = process_start_ticks(os.getpid()) if exit_code is None else 1
        state = RunState(os.getpid(), ticks or 0, os.uname().nodename, "running", 7, 9, exit_code=exit_code)
        (self.path / run_state.NAME).write_text(json.dumps(dataclasses.asdict(state)))


def append(path: Path, text: str, at_s: Optional[float] = None, marked: bool = True) -> None:
    """Append to a log."""
    with path.open("a") as file:
        file.write(text)
    if at_s is not None:
        os.utime(str(path), (at_s, at_s))
        if marked:
            with path.with_suffix(".times").open("a") as times:
                times.write(f"{at_s} {path.stat().st_size}\n")


def started(instance: int, pid: int, host: str) -> str:
    """Return the first line of the output of a process."""
    return f"instance {instance} of 2, pid {pid}: started on {host}\n"
