"""Kills the processes of a local Ray session once its driver has ended; run as a script.

Its input is a pipe from the driver: lines "PID START_TICKS", one for each process that leads a session (setsid) of
Ray's processes. The input closes when the driver ends, whatever the cause. Only the standard library, one thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Dict, List

_KILL_S = 5.0  # bound for killed processes to disappear


def members(leaders: Dict[int, int]) -> List[int]:
    """Return the pids of the live processes in the sessions of `leaders` (pid: start time in clock ticks since boot).

    A session whose leader has another start time has nothing to do with Ray: the pid was reused.
    """
    fields: Dict[int, List[bytes]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # the process ended
                fields[int(folder.name)] = (folder / "stat").read_bytes().rpartition(b")")[2].split()
    sessions = {pid for pid, ticks in leaders.items() if pid not in fields or int(fields[pid][19]) == ticks}
    return [pid for pid, each in fields.items() if int(each[3]) in sessions and each[0] != b"Z"]


def kill(leaders: Dict[int, int]) -> None:
    """Send SIGKILL to the processes in the sessions of `leaders` until none is left, for at most 5 s."""
    deadline = time.monotonic() + _KILL_S
    left = members(leaders)
    while left and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        left = members(leaders)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the end of the driver ends this process
    kill({int(pid): int(ticks) for pid, ticks in (line.split() for line in sys.stdin)})
