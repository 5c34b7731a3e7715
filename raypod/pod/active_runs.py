"""The programs that use a Ray cluster, and that a restart of its head would end: their run folders and their end.

`python3 active_runs.py CLUSTER`, a start command of the head in the cluster files, exits with 1 if there are any; the
GCS of the cluster names them. `python3 - folders|stop DRIVERS < active_runs.py` is for those on this host, of which
`raypod up` sends what `runtime/workers/gcs.py` returns, as JSON. One file, Python 3.6, standard library.
"""

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

STOP_S = 900.0  # as `raypod stop`: for a long call and a large checkpoint
END_S = 30.0  # for a program without a run: raypod knows of nothing that it could save
_EXIT_S = 10.0  # for the process of a run to end after it
_MARK = b"RAYPOD_CLUSTER="
_GCS_CLIENT = "runtime/workers/gcs.py"
_GCS_S = 30.0
_NAMESPACE = "raypod"  # of trainings and launches, which end by SIGINT, with a checkpoint if they write any
_ENTRIES = Path("/tmp")  # the parent of the folders of `observe/status/endpoint.py`
_MAX_BYTES = 16384
_POLL_S = 0.1
Driver = Dict[str, Any]


class _Waited(NamedTuple):
    """A driver that was signalled: its start time, until when it is awaited, what is wrong then, its run's lease."""

    ticks: int
    deadline_s: float
    reason: str
    lease: Optional[Path]


def check(cluster: str) -> str:
    """Return why Ray must not be restarted on this host, the head of a cluster; "" if nothing uses the cluster."""
    found = _gcs_server(cluster)
    if found is None:
        return ""
    address, variables = found
    script = str(Path(__file__).resolve().parent.parent / _GCS_CLIENT)
    try:
        done = subprocess.run(  # noqa: UP022 - Python 3.6 has no capture_output
            [sys.executable, script, "--drivers", address],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=_GCS_S,
            check=True,
        )
        answer = json.loads(done.stdout.decode())
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        answer = {"drivers": [], "error": str(error)}
    if answer["error"]:
        advice = "`raypod up --stop-runs` restarts Ray all the same"
        return f"whether programs use {cluster} is unknown: {answer['error']}; {advice}"
    if not answer["drivers"]:
        return ""
    folders = run_folders(answer["drivers"])
    names = [folders.get(str(each["pid"])) or without_values(each["entrypoint"]) for each in answer["drivers"]]
    named = [f"{name} (pid {each['pid']} on {each['address']})" for name, each in zip(names, answer["drivers"])]
    return f"a restart of Ray would end active programs; `raypod up --stop-runs` stops them first: {', '.join(named)}"


def run_folders(drivers: List[Driver]) -> Dict[str, str]:
    """Return the run folder of every training and launch among the drivers, by pid: from its entry for the monitor."""
    found = {}
    for each in drivers:
        with contextlib.suppress(OSError, StopIteration):
            uid = _uid(each["pid"])
            folder = _ENTRIES / f"raypod-{uid}"
            known = folder.lstat()
            if not stat.S_ISDIR(known.st_mode) or known.st_uid != uid or known.st_mode & 0o077:
                continue  # another user could have written it
            for path in folder.glob(f"{each['pid']}-*.json"):
                entry = _entry(path)
                if entry.get("started_ticks") == _start_ticks(each["pid"]):
                    found[str(each["pid"])] = str(entry.get("run_dir"))
    return found


def stop(drivers: List[Driver], run_s: float = STOP_S, end_s: float = END_S) -> Dict[str, str]:
    """Stop the drivers, trainings with a checkpoint, and wait for their ends; return why the others run on, by pid.

    A run is awaited for `run_s`. It has ended once its process has released the lease of the run folder, even if that
    goes on, as a notebook does. A program without a run is awaited for `end_s`.
    """
    left, waiting, folders = {}, {}, run_folders(drivers)  # type: Dict[str, str], Dict[int, _Waited], Dict[str, str]
    for each in drivers:
        pid, ticks = each["pid"], _start_ticks(each["pid"])
        if ticks is None:
            continue  # it has just ended
        if not is_driver(each):  # in a container, or the pid has another process by now
            left[str(pid)] = "its process is not visible on this host"
            continue
        folder = folders.get(str(pid))
        waited = _waited_run(pid, ticks, folder, run_s) if folder else _waited(ticks, end_s, ": it has no active run")
        try:
            os.kill(pid, signal.SIGINT if folder or each["namespace"] == _NAMESPACE else signal.SIGTERM)
            waiting[pid] = waited
        except ProcessLookupError:
            continue
        except OSError as error:
            left[str(pid)] = str(error.strerror)
    left.update(_await_ends(waiting))
    return left


def _await_ends(waiting: Dict[int, _Waited]) -> Dict[str, str]:
    """Wait for the ends of drivers; return why the others run on, by pid."""
    left = {}
    while waiting:
        waiting = {pid: _now(pid, waited) for pid, waited in waiting.items() if _start_ticks(pid) == waited.ticks}
        now_s = time.monotonic()
        left.update({str(pid): waited.reason for pid, waited in waiting.items() if now_s >= waited.deadline_s})
        waiting = {pid: waited for pid, waited in waiting.items() if str(pid) not in left}
        time.sleep(_POLL_S if waiting else 0)
    return left


def _now(pid: int, waited: _Waited) -> _Waited:
    """Return until when a driver is awaited by now, and what is wrong then."""
    if _state(pid) == b"T":
        return waited._replace(deadline_s=0, reason=f"it is stopped (SIGSTOP); `kill -CONT {pid}` lets it end")
    if waited.lease is not None and not waited.lease.exists():
        reason = "its run has ended, but the program goes on"
        return _waited(waited.ticks, _EXIT_S, "")._replace(reason=reason)
    return waited


def _waited(ticks: int, within_s: float, addition: str) -> _Waited:
    return _Waited(ticks, time.monotonic() + within_s, f"it has not ended within {within_s:g} s{addition}", None)


def _waited_run(pid: int, ticks: int, folder: str, within_s: float) -> _Waited:
    return _waited(ticks, within_s, "")._replace(lease=_lease_of(folder, pid, ticks))


def without_values(command: str) -> str:
    """Return a command line without the values of `raypod launch -x NAME=VALUE`, which can be secrets."""
    return re.sub(r"(-x\s+\w+=)('[^']*'|\"[^\"]*\"|\S+)", r"\1***", command)


def is_driver(driver: Driver) -> bool:
    """Return whether the process with the pid of a driver has its command line."""
    words = _read(driver["pid"], "cmdline").decode(errors="replace").split("\0")[:-1]
    return bool(words) and str(driver["entrypoint"]).endswith(subprocess.list2cmdline(words))


def _gcs_server(cluster: str) -> Optional[Tuple[str, Dict[str, str]]]:
    """Return the address of this user's GCS of the cluster on this host, and the environment of its process."""
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        if not _is_own(pid):  # root can read every environment, and must not run a program in it
            continue
        words = _read(pid, "cmdline").decode(errors="replace").split("\0")
        variables = _read(pid, "environ").split(b"\0")
        if words[0].endswith("/gcs_server") and _MARK + os.fsencode(cluster) in variables:
            given = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
            address = f"{given.get('node-ip-address', '127.0.0.1')}:{given.get('gcs_server_port', '6379')}"
            return address, dict(os.fsdecode(each).partition("=")[::2] for each in variables if b"=" in each)
    return None


def _lease_of(folder: str, pid: int, ticks: int) -> Optional[Path]:
    """Return the file of the lease of a run folder that a process of this host holds (see `runs/lease.py`)."""
    for path in Path(folder).glob("lease-*.json"):
        with contextlib.suppress(OSError):
            holder = _entry(path)
            if (holder.get("pid"), holder.get("started_ticks")) == (pid, ticks):
                return path
    return None


def _entry(path: Path) -> Dict[str, Any]:
    descriptor = os.open(str(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file, contextlib.suppress(ValueError, RecursionError):
        found = json.loads(file.read(_MAX_BYTES).decode())
        if isinstance(found, dict):
            return found
    return {}


def _is_own(pid: int) -> bool:
    try:
        return _uid(pid) == os.getuid()
    except (OSError, StopIteration):  # it has ended
        return False


def _uid(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Uid:")))


def _start_ticks(pid: int) -> Optional[int]:
    """Return the start time of a process in clock ticks since boot; None if it has ended."""
    words = _stat(pid)
    return int(words[19]) if words and words[0] != b"Z" else None


def _state(pid: int) -> bytes:
    """Return the letter of the state of a process, as in proc(5); empty if it has ended."""
    return b"".join(_stat(pid)[:1])


def _stat(pid: int) -> List[bytes]:
    return _read(pid, "stat").rpartition(b")")[2].split()


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # the process exited, or belongs to another user
        return b""


def _print_error(text: str) -> None:
    sys.stderr.write("raypod: " + "".join(each if each.isprintable() else "?" for each in text) + "\n")


def main(words: List[str]) -> int:
    """Run a mode of this file."""
    if words[0] in ("folders", "stop"):
        drivers = json.loads(words[1])
        sys.stdout.write(json.dumps({words[0]: (run_folders if words[0] == "folders" else stop)(drivers)}) + "\n")
        return 0
    problem = check(words[0])
    if problem:
        _print_error(problem)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
