"""`state.json`: the process and the progress of a run, for `status`, `attach` and `stop`; and whether it has ended.

The coordinator writes it at most once per second, and less often on a disk on which that takes long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import socket
import time
from pathlib import Path
from typing import NamedTuple, Optional, Tuple

from raypod.errors import LeaseLost, Preempted, RaypodError
from raypod.events import Event, Repaired, RunEnded, RunStarted, UpdateDone
from raypod.plan import layout
from raypod.plan.layout import LAUNCH, STATE
from raypod.runs import lease
from raypod.runs.callback import Callback
from raypod.runs.lease import LeaseFile, Log
from raypod.runs.run_view import RunView
from raypod.system import command_line as cli
from raypod.system.files import parse_json, replace_file, strict_json
from raypod.system.job_driver import submission_id_of
from raypod.system.process import has_open, is_stopped, process_start_ticks
from raypod.system.signals import on_abort

_WRITE_INTERVAL_S = 1.0
_SHARE = 0.05  # of the time: a write waits for the disk
STARTING, RUNNING, DONE, INTERRUPTED, FAILED = "starting", "running", "done", "interrupted", "failed"
PREEMPTED = "preempted"


@dataclasses.dataclass(frozen=True)
class RunState:
    """The content of the file."""

    pid: int
    started_ticks: int  # start time of the process, in clock ticks since boot: pids are reused
    host: str
    state: str
    update: int
    total_updates: int
    loss: Optional[float] = None
    samples_per_s: Optional[float] = None
    samples_are: str = "samples"  # what the task calls them, as in "images"
    eta_s: Optional[float] = None  # see `Plan.eta_s`
    restarts: int = 0  # since the coordinator was started
    exit_code: Optional[int] = None
    message: str = ""  # why the run ended: of an error or of early stopping
    written_at_s: float = 0.0  # seconds since 1970
    status_port: Optional[int] = None  # of the status endpoint on the coordinator's loopback interface, while it runs
    status_token_file: Optional[str] = None  # path of the file with the token of the endpoint, mode 0600
    submission_id: Optional[str] = None  # of the Ray job in which the coordinator runs

    @property
    def is_local(self) -> bool:
        """Whether the run's coordinator was started on this host."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether the coordinator's process runs; always False on another host."""
        return self.is_local and process_start_ticks(self.pid) == self.started_ticks

    @property
    def is_stopped(self) -> bool:
        """Whether the coordinator's process is stopped, by SIGSTOP or a debugger; always False on another host."""
        return self.is_alive and is_stopped(self.pid)

    @property
    def has_ended(self) -> bool:
        """Whether the file holds the end of the run."""
        return self.exit_code is not None

    @property
    def is_running(self) -> bool:
        """Whether the coordinator of the run is another, live process.

        Checks the process, because a full disk can prevent writing the end of the run.
        """
        return self.is_alive and not self.has_ended and self.pid != os.getpid()

    @property
    def may_be_running(self) -> bool:
        """As `is_running`, and True for a run on another host whose end the file does not hold."""
        return self.is_running if self.is_local else not self.has_ended


def read(run_dir: Path) -> Optional[RunState]:
    """Return the state of the run in a folder; None if there is none."""
    try:
        state = RunState(**parse_json((run_dir / STATE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    # A file can hold anything: null as the start time would be equal to that of a process that does not exist.
    return state if type(state.pid) is int and type(state.started_ticks) is int else None


def is_unfinished(run_dir: Path) -> bool:
    """Return whether the run in a folder died, failed or was interrupted, and can be resumed.

    So can one whose file cannot be read, as it can be after a power loss: what it has done already is not repeated.
    """
    state = read(run_dir)
    if state is None:
        return (run_dir / STATE).is_file()
    return state.state != DONE and not state.is_running


def end_of(error: BaseException) -> Tuple[str, int, str]:
    """Return the state, the exit code and the message of a run that an error ends."""
    if isinstance(error, Preempted):
        return PREEMPTED, error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, cli.INTERRUPTED, ""
    code = error.exit_code if isinstance(error, RaypodError) else 1
    return FAILED, code, " ".join(f"{error}".split()) or type(error).__name__


class StateFile(Callback):
    """Writes the state of the run of this process."""

    def __init__(self, run_dir: Path, view: RunView, preemption_exit_code: int = cli.INTERRUPTED) -> None:
        """`view` has handled each event before this does."""
        self._path, self._view, self._preemption_exit_code = run_dir / STATE, view, preemption_exit_code
        plan = view.plan
        ticks = process_start_ticks(os.getpid()) or 0
        own = (os.getpid(), ticks, socket.gethostname())
        job, samples_are = submission_id_of(os.environ), plan.task.samples_are
        self._state = RunState(*own, STARTING, 0, plan.total_updates, submission_id=job, samples_are=samples_are)
        self._next_write_s = 0.0
        self._stack = contextlib.ExitStack()
        self._write(self._state)

    def serve_status(self, port: int, token_file: str) -> None:
        self._write(dataclasses.replace(self._state, status_port=port, status_token_file=token_file))

    def on_event(self, event: Event) -> None:
        """Write what the view says after an event."""
        if not isinstance(event, (RunStarted, UpdateDone, Repaired, RunEnded)):
            return
        if isinstance(event, UpdateDone) and time.monotonic() < self._next_write_s:
            return
        update, restarts = self._view.position, self._view.restarts
        self._state = dataclasses.replace(self._newest(), state=RUNNING, update=update, restarts=restarts)
        if isinstance(event, RunEnded):
            code, state = (cli.INTERRUPTED, INTERRUPTED) if event.interrupted else (0, DONE)
            if event.preempted:
                code, state = self._preemption_exit_code, PREEMPTED
            stopped = self._view.stopped
            message = f"stopped early, as {stopped.reason}" if stopped is not None else ""
            self._state = dataclasses.replace(self._state, state=state, exit_code=code, message=message)
        else:
            self._write(self._state)
        if isinstance(event, RunStarted):
            self._next_write_s = 0.0  # with the first update, it is known that the run trains

    def copy_to(self, folder: Path) -> None:
        """Write into another run folder that the run has failed. OSError as from the disk."""
        failed = dataclasses.replace(self._newest(), state=FAILED, exit_code=1)
        failed = dataclasses.replace(failed, status_port=None, status_token_file=None)
        replace_file(folder / STATE, (strict_json(dataclasses.asdict(failed)) + "\n").encode())

    def __enter__(self) -> StateFile:
        self._stack.enter_context(on_abort(self._record_end))
        return self

    def __exit__(self, kind: Optional[type], error: Optional[BaseException], trace: object) -> None:
        self._stack.close()
        self._record_end(error)

    def _record_end(self, error: Optional[BaseException]) -> None:
        """Write how the run ended, unless another process has taken over the folder."""
        if isinstance(error, LeaseLost):
            return
        self._state = dataclasses.replace(self._newest(), status_port=None, status_token_file=None, eta_s=None)
        if error is not None:
            state, code, message = end_of(error)
            self._state = dataclasses.replace(self._state, state=state, exit_code=code, message=message)
        self._write(self._state)

    def _newest(self) -> RunState:
        """Return the state after the last update: not every update is written."""
        view, last = self._view, self._view.update
        if last is None:
            return self._state
        state = dataclasses.replace(self._state, update=view.position, restarts=view.restarts)
        eta_s = view.plan.eta_s(view.position, last.samples_per_s)
        return dataclasses.replace(state, loss=last.loss, samples_per_s=last.samples_per_s, eta_s=eta_s)

    def _write(self, state: RunState) -> None:
        self._state, began_s = state, time.monotonic()
        content = strict_json(dataclasses.asdict(dataclasses.replace(state, written_at_s=time.time())))
        with contextlib.suppress(OSError):  # a full or lost disk: the file keeps an older state
            replace_file(self._path, (content + "\n").encode())
        took_s = time.monotonic() - began_s
        self._next_write_s = began_s + max(_WRITE_INTERVAL_S, took_s / _SHARE)


_LAUNCH_KEYS = ("pid", "started_ticks", "host", "state", "exit_code")
_DEAD_S = 3600.0  # no two clocks differ by as much
_EXIT_S = 3.0  # a process that has recorded its end may print more for at most this time


class RunEnd(NamedTuple):
    """The last state of a run that has ended; `exit_code` is None if its coordinator died."""

    state: RunState
    exit_code: Optional[int]


class RunEndWatch:
    """Watches the folder of a run or a launch until that ends.

    Attributes:
        is_known: whether the folder names the process of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self.is_known = run_dir, False
        self._renewed_s, self._changed_s = 0.0, 0.0  # of the lease; by its clock and by the clock of this process
        self._ended_s: Optional[float] = None  # when this process read the end

    @property
    def has_died(self) -> bool:
        """Whether the coordinator has ended without recording it, as far as this is known at the time of the call."""
        end = self.poll()
        return end is not None and end.exit_code is None

    def observe(self, log: Log) -> None:
        """Wait until it is known whether the coordinator lives, if another host holds the lease; `log` prints a line.

        That host, its disk and this host have clocks of their own: the age of a heartbeat alone proves no death.
        """
        state, found, now_s = read(self._run_dir), lease.current(self._run_dir), time.time()
        if state is None or found is None or state.is_local or state.has_ended:
            return
        if now_s - found.renewed_s >= _DEAD_S or lease.has_ended(found, now_s, log):
            self._renewed_s, self._changed_s = found.renewed_s, -math.inf

    def poll(self) -> Optional[RunEnd]:
        """Return the end of the run; None while it runs or prints its last output, and without a `state.json`."""
        found = lease.current(self._run_dir)  # before the state, which holds the end when the lease is released
        state = read(self._run_dir) or _launch_state(self._run_dir)
        self.is_known = self.is_known or state is not None
        if found is not None and found.renewed_s != self._renewed_s:
            self._renewed_s, self._changed_s = found.renewed_s, time.monotonic()
        if state is None:
            return None
        if not state.has_ended:
            self._ended_s = None
            return None if self._is_alive(state, found) else RunEnd(state, None)
        if self._ended_s is None:
            self._ended_s = time.monotonic()
        is_exiting = state.is_alive and time.monotonic() - self._ended_s < _EXIT_S
        return None if is_exiting else RunEnd(state, state.exit_code)

    def _is_alive(self, state: RunState, found: Optional[LeaseFile]) -> bool:
        """Return whether the process of a run without an end lives; on another host its lease tells."""
        if state.is_local:
            return state.is_alive
        if found is None:  # a launch has none
            return not (self._run_dir / layout.STATE).exists()
        return time.monotonic() - self._changed_s < found.expires_after_s


def is_coordinator(run_dir: Path, state: RunState) -> bool:
    """Return whether the process that a state names holds the run folder, before it gets a signal.

    A folder can be a copy or another user's, and then it names any process. The one of the run has the newest lease on
    this host, and it has the event log open, which no file can claim.
    """
    found = lease.current(run_dir)
    holder = found.holder if found else None
    if holder is None or not holder.is_local or (holder.pid, holder.started_ticks) != (state.pid, state.started_ticks):
        return False
    return state.is_alive and has_open(state.pid, run_dir / layout.EVENTS)


def _launch_state(folder: Path) -> Optional[RunState]:
    """Return the process and the end of a launch as a state without updates; None if the folder has no launch."""
    try:
        content = parse_json((folder / LAUNCH).read_text())
        return RunState(update=0, total_updates=0, **{key: content[key] for key in _LAUNCH_KEYS if key in content})
    except (OSError, ValueError, TypeError, KeyError):
        return None
