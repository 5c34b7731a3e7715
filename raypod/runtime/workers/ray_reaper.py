"""Kills the processes of a local Ray session once its driver has ended; run as a script.

Its input is a pipe from the driver: lines with one pid, that of a process that has just become the leader of a session
(setsid) of Ray's processes. The input closes when the driver ends, whatever the cause. The argument is the folder of
psutil, the only package that it imports: without the others of `site` it starts sooner. One thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import Dict, List, Optional

if __name__ == "__main__":
    sys.path.append(sys.argv[1])

import psutil

_KILL_S = 5.0  # bound for killed processes to disappear


def members(leaders: Dict[int, Optional[psutil.Process]]) -> List[int]:
    """Return the pids of the live processes in the sessions of `leaders`, by pid; None if one has ended at once.

    A session whose leader is another process by now has nothing to do with Ray: the pid was reused.
    """
    sessions = {pid for pid, each in leaders.items() if (each and each.is_running()) or not psutil.pid_exists(pid)}
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):  # the process ended
            if os.getsid(pid) in sessions and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def kill(leaders: Dict[int, Optional[psutil.Process]]) -> None:
    """Send SIGKILL to the processes in the sessions of `leaders` until none is left, for at most 5 s."""
    deadline = time.monotonic() + _KILL_S
    left = members(leaders)
    while left and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        left = members(leaders)


def process_of(pid: int) -> Optional[psutil.Process]:
    """Return a process with its start time, which identifies it later on; None if it has ended."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the end of the driver ends this process
    kill({pid: process_of(pid) for pid in map(int, sys.stdin)})
