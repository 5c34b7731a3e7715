"""Run folders that are written while the dashboard reads them."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Optional

from raypod.plan import layout
from raypod.runs import run_state
from raypod.runs.run_state import RunState
from raypod.system.process import process_start_ticks


class Run:
    """A run of this process with a loss of 1/update."""

    def __init__(self, path: Path, updates: int = 0) -> None:
        path.mkdir(parents=True)
        self.path, self.updates = path, 0
        self.train(updates)

    def train(self, updates: int) -> None:
        with (self.path / "metrics.jsonl").open("a") as file:
            for _ in range(updates):
                self.updates += 1
                record = {"update": self.updates, "epoch": 1, "loss": 1 / self.updates, "samples": 8 * self.updates}
                file.write(json.dumps({**record, "samples_per_s": 80.0, "time_s": self.updates / 10}) + "\n")
        self.state(run_state.RUNNING)

    def state(self, name: str, exit_code: Optional[int] = None, ticks: Optional[int] = None) -> None:
        started_ticks = process_start_ticks(os.getpid()) or 0 if ticks is None else ticks
        loss = 1 / self.updates if self.updates else None
        state = RunState(os.getpid(), started_ticks, os.uname().nodename, name, self.updates, 1000, loss, 80.0)
        state = dataclasses.replace(state, exit_code=exit_code, written_at_s=1e9 + self.updates, restarts=1)
        partial = self.path / "partial"
        partial.write_text(json.dumps(dataclasses.asdict(state)))
        partial.replace(self.path / layout.STATE)
