"""Whether a run or a launch has ended, judged from its folder on any host that can read it."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import NamedTuple, Optional

from raypod.plan import layout
from raypod.plan.layout import LAUNCH
from raypod.runs import lease_file, run_state
from raypod.runs.lease_file import LeaseFile, Log
from raypod.runs.run_state import RunState
from raypod.system.files import parse_json
from raypod.system.process import has_open

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
        state, found, now_s = run_state.read(self._run_dir), lease_file.current(self._run_dir), time.time()
        if state is None or found is None or state.is_local or state.has_ended:
            return
        if now_s - found.renewed_s >= _DEAD_S or lease_file.has_ended(found, now_s, log):
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
    found = lease_file.current(run_dir)
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
