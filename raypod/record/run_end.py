"""Whether a run or a launch has ended, judged from its folder on any host that can read it."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import NamedTuple, Optional

from raypod.host import lease_file
from raypod.host.files import parse_json
from raypod.host.lease_file import LeaseFile, Log
from raypod.host.process import has_open
from raypod.record import event_log, run_state
from raypod.record.run_state import RunState

LAUNCH = "launch.json"  # written by raypod launch, with these keys and others
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
        """Wait until it is known whether the coordinator lives, if another host holds the lease; see `has_ended`."""
        state, found = run_state.read(self._run_dir), lease_file.current(self._run_dir)
        if state is not None and found is not None and not is_observed_alive(state, found, log):
            self._renewed_s, self._changed_s = found.renewed_s, -math.inf

    def poll(self) -> Optional[RunEnd]:
        """Return the end of the run; None while it runs or prints its last output, and without a `state.json`."""
        found = lease_file.current(self._run_dir)  # before the state, which holds the end when the lease is released
        state = run_state.read(self._run_dir) or _launch_state(self._run_dir)
        self.is_known = self.is_known or state is not None
        if found is not None and found.renewed_s != self._renewed_s:
            self._renewed_s, self._changed_s = found.renewed_s, time.monotonic()
        if state is None:
            return None
        if not state.has_ended:
            self._ended_s = None
            is_remote_launch = found is None and not state.is_local and not (self._run_dir / run_state.NAME).exists()
            alive = is_remote_launch or may_be_alive(state, found, time.monotonic() - self._changed_s)
            return None if alive else RunEnd(state, None)
        if self._ended_s is None:
            self._ended_s = time.monotonic()
        is_exiting = state.is_alive and time.monotonic() - self._ended_s < _EXIT_S
        return None if is_exiting else RunEnd(state, state.exit_code)


def may_be_alive(state: RunState, found: Optional[LeaseFile], silent_s: float) -> bool:
    """Return whether the coordinator lives. On another host that is judged by its lease, silent for `silent_s`."""
    return state.is_alive if state.is_local else found is not None and silent_s < found.expires_after_s


def is_observed_alive(state: RunState, found: Optional[LeaseFile], log: Log) -> bool:
    """Return whether the coordinator lives. `log` prints a line before a lease of another host is observed.

    That host, its disk and this host have clocks of their own: the age of a heartbeat alone proves no death.
    """
    if state.is_local or found is None or state.has_ended:
        return state.is_alive
    now_s = time.time()
    return now_s - found.renewed_s < _DEAD_S and not lease_file.has_ended(found, now_s, log)


def is_coordinator(run_dir: Path, state: RunState) -> bool:
    """Return whether the process that a state names holds the run folder, before it gets a signal.

    A folder can be a copy or another user's, and then it names any process. The one of the run has the newest lease on
    this host, and it has the event log open, which no file can claim.
    """
    found = lease_file.current(run_dir)
    holder = found.holder if found else None
    if holder is None or not holder.is_local or (holder.pid, holder.started_ticks) != (state.pid, state.started_ticks):
        return False
    return state.is_alive and has_open(state.pid, run_dir / event_log.NAME)


def _launch_state(folder: Path) -> Optional[RunState]:
    """Return the process and the end of a launch as a state without updates; None if the folder has no launch."""
    try:
        content = parse_json((folder / LAUNCH).read_text())
        return RunState(update=0, total_updates=0, **{key: content[key] for key in _LAUNCH_KEYS if key in content})
    except (OSError, ValueError, TypeError, KeyError):
        return None
