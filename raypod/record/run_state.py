"""state.json: which process carries out a run, and how far it is. For whoever asks from outside.

The coordinator writes it once a second at most. It is a view: a run does not depend on it, but for one thing. Nobody
starts a second coordinator in a folder whose first one is alive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time
from pathlib import Path
from typing import Optional

from raypod.errors import ConfigError, RaypodError
from raypod.events import Event, Repaired, RunEnded, RunStarted, UpdateDone
from raypod.host import files
from raypod.host.process import ticks_of

NAME = "state.json"
_EVERY_S = 1.0
STARTING, RUNNING, DONE, INTERRUPTED, FAILED = "starting", "running", "done", "interrupted", "failed"


@dataclasses.dataclass(frozen=True)
class RunState:
    """What the file holds."""

    pid: int
    started_ticks: int  # when that process began, in the kernel's ticks since boot: a pid is used again
    host: str
    state: str
    update: int
    total_updates: int
    loss: Optional[float] = None
    samples_per_s: Optional[float] = None
    restarts: int = 0  # repairs since the coordinator was started
    exit_code: Optional[int] = None
    message: str = ""  # why it failed
    written_at_s: float = 0.0  # seconds since 1970

    @property
    def is_here(self) -> bool:
        """Whether the run's coordinator was started on this host."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether its process still runs; only the coordinator's own host can tell."""
        return self.is_here and ticks_of(self.pid) == self.started_ticks

    @property
    def is_over(self) -> bool:
        """Whether it has said how it ended."""
        return self.exit_code is not None

    @property
    def is_going_on(self) -> bool:
        """Whether another process carries the run out now. A full disk may have kept the end out of the file."""
        return self.is_alive and not self.is_over and self.pid != os.getpid()


def read(run_dir: Path) -> Optional[RunState]:
    """The state of the run in a folder; None where none was written."""
    try:
        return RunState(**json.loads((run_dir / NAME).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def was_cut_off(run_dir: Path) -> bool:
    """Whether a run in this folder ended before its time: its coordinator died, it failed, or it was interrupted."""
    state = read(run_dir)
    return state is not None and state.state != DONE and state.is_here and not state.is_going_on


def refuse_if_alive(run_dir: Path) -> None:
    """ConfigError if the coordinator of the run in this folder is alive."""
    state = read(run_dir)
    if state is not None and state.is_going_on:
        raise ConfigError(
            f"{run_dir} is in use: its run is at update {state.update} (pid {state.pid}); "
            f"python -m raypod attach {run_dir} follows it, python -m raypod stop {run_dir} ends it"
        )


class StateFile:
    """The state of a run while this process carries it out."""

    def __init__(self, run_dir: Path, total_updates: int) -> None:
        self._path = run_dir / NAME
        ticks = ticks_of(os.getpid()) or 0
        self._now = RunState(os.getpid(), ticks, socket.gethostname(), STARTING, 0, total_updates)
        self._written_s = -_EVERY_S
        self._write(self._now)

    def take(self, event: Event) -> None:
        """Follow the run."""
        if isinstance(event, RunStarted):
            self._write(dataclasses.replace(self._now, state=RUNNING, update=event.first_update))
        elif isinstance(event, UpdateDone):
            self._now = dataclasses.replace(
                self._now, update=event.update, loss=event.loss, samples_per_s=event.samples_per_s
            )
            if time.monotonic() - self._written_s >= _EVERY_S:
                self._write(self._now)
        elif isinstance(event, Repaired):
            self._write(dataclasses.replace(self._now, update=event.update, restarts=event.restarts))
        elif isinstance(event, RunEnded):
            code, state = (130, INTERRUPTED) if event.interrupted else (0, DONE)
            self._now = dataclasses.replace(self._now, state=state, exit_code=code, update=event.updates)

    def __enter__(self) -> StateFile:
        return self

    def __exit__(self, kind: Optional[type], error: Optional[BaseException], _: object) -> None:
        """Say how it ended."""
        if isinstance(error, KeyboardInterrupt):
            self._now = dataclasses.replace(self._now, state=INTERRUPTED, exit_code=130)
        elif error is not None:
            code = error.exit_code if isinstance(error, RaypodError) else 1
            told = " ".join(f"{error}".split()) or type(error).__name__
            self._now = dataclasses.replace(self._now, state=FAILED, exit_code=code, message=told)
        self._write(self._now)

    def _write(self, state: RunState) -> None:
        self._now, self._written_s = state, time.monotonic()
        content = files.plain_json(dataclasses.asdict(dataclasses.replace(state, written_at_s=time.time())))
        partial = self._path.with_name(NAME + ".partial")
        with contextlib.suppress(OSError):  # a full disk: whoever asks sees an older state
            partial.write_text(content + "\n")
            partial.replace(self._path)
