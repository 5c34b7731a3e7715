"""The processes beside a run without processes: their starts, and the clock of the coordinator that looks at them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import List, Optional

import pytest

from raypod.system import companion, retries


class FakeProcess:
    """A process in name only: its arguments, and the lines that it got."""

    def __init__(self, module: str, arguments: List[str], log: Path) -> None:
        self.module, self.arguments, self.log = module, arguments, log
        self.lines: List[str] = []
        self.hangs, self.code = True, None  # type: bool, Optional[int]
        self._reading, writing = os.pipe()
        self.stdin = os.fdopen(writing, "wb", buffering=0)

    def poll(self) -> Optional[int]:
        return 0 if self.stdin.closed and not self.hangs else self.code

    def end(self) -> None:
        self.stdin.close()
        with os.fdopen(self._reading) as lines:
            self.lines = lines.read().split()


class FakeProcesses:
    """Replaces the processes and the clock of all companions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.started = 50.0, []  # type: float, List[FakeProcess]
        self.clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.sleep)
        monkeypatch.setattr(companion, "time", self.clock)
        monkeypatch.setattr(retries, "time", self.clock)
        monkeypatch.setattr(companion, "start_module", self._start)
        monkeypatch.setattr(companion, "end_session", FakeProcess.end)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def _start(self, module: str, arguments: List[str], log: Path) -> FakeProcess:
        self.started.append(FakeProcess(module, arguments, log))
        return self.started[-1]
