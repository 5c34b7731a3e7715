"""Tell the autoscaler of a running head which workers a cluster file has now.

Ray's autoscaler takes the addresses of its workers from the cluster file only when it starts. Of a changed file it
takes the number of workers, and does not find any for it. It keeps the addresses in a state file, which it reads before
each decision, so that this script can change them: `python3 - STATE MODE ADDRESS... < autoscaler_hosts.py`, on the
head. One file, Python 3.6, standard library. Prints a JSON object.
"""

import contextlib
import fcntl
import json
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

KEEP, ADD, AGAIN = "keep", "add", "again"
_KIND, _STATUS, _WORKER = "ray-node-type", "ray-node-status", "worker"  # tags of ray.autoscaler.tags
_NOT_STARTED = ("uninitialized", "update-failed")
_LOCK_S = 20.0
# set_node_tags takes this lock before that of the object, and get in the other order; Ray 2.60 does not. Until filelock
# 3.10, all threads of a process have the lock if one has it, so that none waits.
_HELD = (
    "the autoscaler has held the lock of its state file for {:g} s. That of old versions of Ray, as 2.10, can block "
    "itself while it starts hosts: pip install 'filelock<3.11' in its environment on the head prevents that; "
    "`raypod up` without --no-restart starts the cluster again"
)
_HEX = re.compile(r"(.*\.0x)([0-9a-f]+)")


def change(state: Path, mode: str, addresses: List[str]) -> Dict[str, Any]:
    """Change the workers in the state file; return which of the addresses were not started (`failed`).

    KEEP removes all other workers, so that the autoscaler does not stop any in their place. ADD adds those that are
    missing. AGAIN lets the autoscaler start those that have failed: it does so once for each name in its state file,
    and a new name is another spelling of the address. Does nothing if the file does not exist: no autoscaler runs.

    Raises:
        OSError: the files cannot be read or written, or belong to another user.
        ValueError: the state file is damaged.
    """
    if not state.exists():
        return {"failed": []}
    with _locked(state):
        entries = json.loads(state.read_text())
        workers = {name: entry for name, entry in entries.items() if entry["tags"].get(_KIND) == _WORKER}
        names = {socket.gethostbyname(name): name for name in workers}
        wanted = {socket.gethostbyname(address): address for address in addresses}
        failed = [ip for ip, name in names.items() if workers[name]["tags"].get(_STATUS) in _NOT_STARTED]
        if mode == KEEP:
            for ip in set(names) - set(wanted):
                del entries[names[ip]]
        if mode == AGAIN:
            for ip in set(failed) & set(wanted):
                del entries[names[ip]]
                entries[respelled(names[ip], ip)] = _new_worker()
        if mode == ADD:
            entries.update({wanted[ip]: _new_worker() for ip in wanted if ip not in names})
        partial = state.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(entries))
        partial.replace(state)
    return {"failed": [wanted[ip] for ip in failed if ip in wanted]}


def respelled(name: str, ip: str) -> str:
    """Return the next spelling of an address: its last byte is hexadecimal, with one leading zero more each time."""
    found = _HEX.fullmatch(name)
    if found:
        return found.group(1) + "0" + found.group(2)
    first, _, last = ip.rpartition(".")
    return f"{first}.0x{int(last):x}"


def _new_worker() -> Dict[str, Any]:
    return {"tags": {_KIND: _WORKER}, "state": "terminated"}  # as Ray's local provider begins


@contextlib.contextmanager
def _locked(state: Path) -> Iterator[None]:
    """Hold the lock of the autoscaler."""
    if state.parent.stat().st_uid != os.getuid():
        raise PermissionError(f"{state.parent} belongs to another user")
    with state.with_suffix(".lock").open("a") as lock:
        deadline = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(_HELD.format(_LOCK_S)) from None
                time.sleep(0.1)
        yield


if __name__ == "__main__":
    try:
        result = change(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    except TimeoutError as error:
        sys.exit(str(error))
    print(json.dumps(result))  # noqa: T201
