"""Compare the sources and packages on this host with those that the running Ray of a cluster was started with.

`python3 - MODE CLUSTER FOLDER... < loaded_sources.py`, where MODE is `record`, after a start of Ray, or `compare`. The
folders contain the synchronized sources. One file, Python 3.6, standard library. Prints a JSON object.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

_MARK = "RAYPOD_CLUSTER"
TIMEOUT_S = 90.0  # of the script; longer than that of the interpreter that lists the packages
_PACKAGES_S = 60.0
_PACKAGES = """
import importlib.metadata, json
print(json.dumps({each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}))
"""


def compare(mode: str, cluster: str, folders: List[str]) -> Dict[str, Any]:
    """Return what has changed since the start of Ray: files and packages; `raylet` is None if Ray does not run here.

    If the running raylet is not the recorded one, files that are newer than its process have changed.
    """
    raylet = _raylet(cluster)
    if raylet is None:
        return {"raylet": None, "changes": []}
    path = Path(os.path.expanduser("~/.raypod")) / f"ray-{cluster}.json"  # noqa: PTH111
    identity, files, packages = _identity(raylet), _files(folders), _packages(raylet)
    before = _read_record(path)
    if mode == "compare" and before.get("raylet") == identity:
        changes = _changed(before["files"], files)
        changes += [f"package {name}" for name in _changed(before["packages"], packages)]
    else:
        changes = [] if mode == "record" else [file for file in files if _changed_s(file) > _start_s(raylet)]
        if not changes:
            _write_record(path, {"raylet": identity, "files": files, "packages": packages})
    return {"raylet": raylet, "changes": changes}


def _raylet(cluster: str) -> Optional[int]:
    """Return the pid of the raylet of the cluster on this host."""
    mark = f"{_MARK}={cluster}".encode()
    for pid in _pids():
        if _words(pid, "cmdline")[0].endswith(b"/raylet") and mark in _words(pid, "environ"):
            return pid
    return None


def _identity(pid: int) -> List[str]:
    return [str(pid), _stat(pid)[19], Path("/proc/sys/kernel/random/boot_id").read_text().strip()]


def _files(folders: List[str]) -> Dict[str, str]:
    """Return the hash of every Python module in the folders, by path."""
    found = {}
    for folder in folders:
        top = Path(os.path.expanduser(folder))  # noqa: PTH111
        paths = [top] if top.is_file() else sorted(top.rglob("*"))
        for path in paths:
            if path.suffix in (".py", ".so") and path.is_file():
                found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _packages(raylet: int) -> Dict[str, str]:
    """Return the packages of the interpreter that runs Ray's workers, with their versions."""
    option = b"--python_worker_command="
    commands = [word[len(option) :] for word in _words(raylet, "cmdline") if word.startswith(option)]
    if not commands:
        return {}
    environment = dict(word.partition(b"=")[::2] for word in _words(raylet, "environ") if b"=" in word)
    done = subprocess.run(  # noqa: UP022 - Python 3.6 has no capture_output
        [commands[0].split()[0], b"-c", _PACKAGES.encode()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=str(Path.home()),
        timeout=_PACKAGES_S,
        check=True,
    )
    return dict(json.loads(done.stdout.decode().splitlines()[-1]))


def _read_record(path: Path) -> Dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):  # none yet
        return dict(json.loads(path.read_text()))
    return {}


def _write_record(path: Path, record: Dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(record))
    partial.replace(path)


def _changed(before: Dict[str, str], now: Dict[str, str]) -> List[str]:
    return sorted(name for name in set(before) | set(now) if before.get(name) != now.get(name))


def _changed_s(path: str) -> float:
    return os.stat(path).st_ctime  # noqa: PTH116


def _start_s(pid: int) -> float:
    """Return the start of a process, in seconds since the epoch."""
    boot = next(line.split()[1] for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    return int(boot) + int(_stat(pid)[19]) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> List[str]:
    """Return the fields of /proc/PID/stat from the third on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _words(pid: int, name: str) -> List[bytes]:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")
    except OSError:  # the process exited, or belongs to another user
        return [b""]


def _pids() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


if __name__ == "__main__":
    print(json.dumps(compare(sys.argv[1], sys.argv[2], sys.argv[3:])))  # noqa: T201 - the result
