"""End the processes of one Ray cluster on this host, and no others: `python3 stop_cluster.py CLUSTER_NAME`.

`ray stop` ends all Ray processes on the host, also those of other clusters. This script ends the processes with
RAYPOD_CLUSTER=<name> in their environment, of the user that runs it alone, and their descendants: Ray's agents and
workers overwrite their environment with a process title. It also ends agents and workers of a raylet that died, which
keep its ports for a moment. The start commands of the cluster files run it, and `raypod down` over ssh. Python 3.6 is
enough.
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
_GRACE_S = 5.0  # after SIGTERM, and again after SIGKILL
_RAYLET = b"/raylet/raylet"
_TEMPLATE = b"/worker_template.py"  # the script of the process that forks the workers of a raylet, and ends with it
_TITLE = b"ray::"  # begins the titles of the children of both: agents and workers


def stop(cluster: str) -> Dict[str, int]:
    """End the processes of a cluster.

    Return the number of processes found and left, and the number of raylets of other clusters.
    """
    family = members(cluster)
    left = set(family)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        deadline = time.monotonic() + _GRACE_S
        while left and time.monotonic() < deadline:
            left = {pid for pid in left if _is_alive(pid)}
            time.sleep(0.05)
    others = sum(1 for pid in _pids() if pid not in family and _is_raylet(pid))
    return {"found": len(family), "left": len(left), "others": others}


def members(cluster: str) -> Set[int]:
    """Return the pids of this user's marked processes, their descendants and orphans, without this process's ancestors.

    Another user's cluster can have the same name, that of the file which raypod ships, and root can read its mark.
    """
    mark = (MARK + "=" + cluster).encode()
    parents = {pid: _parent(pid) for pid in _pids()}
    own = _ancestry(os.getpid(), parents)
    mine = {pid for pid in parents if pid not in own and _user(pid) == os.getuid()}
    found = {pid for pid in mine if mark in _read(pid, "environ").split(b"\0")}
    sessions = {_session(pid) for pid in found} - {0}
    found |= {pid for pid in parents if _is_orphan(pid, parents) and _session(pid) in sessions}
    return found | {pid for pid in parents if pid not in own and found & set(_ancestry(pid, parents))}


def _is_orphan(pid: int, parents: Dict[int, int]) -> bool:
    """Return whether a process is an agent or a worker whose raylet died: it has no mark and no marked ancestor."""
    has_parent = any(_is_raylet(each) or _is_template(each) for each in _ancestry(pid, parents))
    return _arguments(pid)[0].startswith(_TITLE) and not has_parent


def _is_raylet(pid: int) -> bool:
    return _arguments(pid)[0].endswith(_RAYLET)


def _is_template(pid: int) -> bool:
    return any(word.endswith(_TEMPLATE) for word in _arguments(pid)[1:2])


def _ancestry(pid: int, parents: Dict[int, int]) -> List[int]:
    """Return the pids of a process and its ancestors."""
    pids = [pid]
    while pids[-1] in parents and parents[pids[-1]] not in pids:
        pids.append(parents[pids[-1]])
    return pids


def _pids() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # the process exited, or belongs to another user
        return b""


def _user(pid: int) -> int:
    """Return the owner of a process; -1 if it exited."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return -1


def _parent(pid: int) -> int:
    return _number(pid, 1)


def _session(pid: int) -> int:
    """Return the session of a process, which all processes of one `ray start` share, also after the death of raylet."""
    return _number(pid, 3)


def _number(pid: int, field: int) -> int:
    """Return a field after the name in /proc/PID/stat; 0 if the process exited."""
    words = _read(pid, "stat").rpartition(b")")[2].split()
    return int(words[field]) if len(words) > field else 0


def _arguments(pid: int) -> List[bytes]:
    return _read(pid, "cmdline").split(b"\0")


def _is_alive(pid: int) -> bool:
    state = _read(pid, "stat").rpartition(b")")[2].split()[:1]
    return bool(state) and state != [b"Z"]


if __name__ == "__main__":
    ended = stop(sys.argv[1])
    print(json.dumps(ended))  # noqa: T201 - the result
    sys.exit(1 if ended["left"] else 0)
