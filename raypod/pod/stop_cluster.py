"""End the processes of one Ray cluster on this host, and nothing else: `python3 stop_cluster.py CLUSTER_NAME`.

`ray stop` ends every Ray process on the host that it may, whoever's it is. Here a process belongs to a cluster if it
has RAYPOD_CLUSTER=<name> in its environment, or descends from one that has: Ray's agents and workers overwrite their
own environment with a title. Run on the hosts by the cluster files' start commands, and over ssh; needs Python 3.6.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Dict, Iterator, List, Set

MARK = "RAYPOD_CLUSTER"
_GRACE_S = 5.0  # to a SIGTERM, and again to the SIGKILL that follows


def stop(cluster: str) -> Dict[str, int]:
    """End them; how many processes there were and are left, and how many raylets of other clusters run."""
    family = members(cluster)
    left = set(family)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        deadline = time.monotonic() + _GRACE_S
        while left and time.monotonic() < deadline:
            left = {pid for pid in left if _lives(pid)}
            time.sleep(0.05)
    others = sum(1 for pid in _pids() if pid not in family and _arguments(pid)[0].endswith(b"/raylet/raylet"))
    return {"found": len(family), "left": len(left), "others": others}


def members(cluster: str) -> Set[int]:
    """The processes of a cluster: those that say so, and their descendants; never this one or those that started it."""
    mark = (MARK + "=" + cluster).encode()
    parents = {pid: _parent(pid) for pid in _pids()}
    own = _line_of(os.getpid(), parents)
    found = {pid for pid in parents if pid not in own and mark in _read(pid, "environ").split(b"\0")}
    return found | {pid for pid in parents if pid not in own and found & set(_line_of(pid, parents))}


def _line_of(pid: int, parents: Dict[int, int]) -> List[int]:
    """A process and its ancestors."""
    line = [pid]
    while line[-1] in parents and parents[line[-1]] not in line:
        line.append(parents[line[-1]])
    return line


def _pids() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""


def _parent(pid: int) -> int:
    words = _read(pid, "stat").rpartition(b")")[2].split()
    return int(words[1]) if len(words) > 1 else 0


def _arguments(pid: int) -> List[bytes]:
    return _read(pid, "cmdline").split(b"\0")


def _lives(pid: int) -> bool:
    state = _read(pid, "stat").rpartition(b")")[2].split()[:1]
    return bool(state) and state != [b"Z"]


if __name__ == "__main__":
    ended = stop(sys.argv[1])
    print(json.dumps(ended))  # noqa: T201 - the answer
    sys.exit(1 if ended["left"] else 0)
