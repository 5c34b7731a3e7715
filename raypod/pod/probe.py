"""Print the facts of this host as JSON, without judging them: `python3 - '<settings as JSON>' < probe.py`.

Runs over ssh on hosts without Ray and raypod: one file, Python 3.6, standard library. Tools run in the environment of a
login shell, as `ray up` starts Ray, each with a timeout.
"""

import array
import contextlib
import fcntl
import getpass
import hashlib
import json
import os
import resource
import shutil
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B  # linux/sockios.h
_TOOL_S = 20.0
_PEER_S = 3.0
_MARK = b"RAYPOD_CLUSTER="
_TEMPLATE = "/worker_template.py"  # of the workers of a raylet, with which it ends
_UNKNOWN_OWNER = {"pid": None, "program": None, "cluster": None, "is_ray": False, "is_orphan": False}
_BEGIN = "--- environment ---"
_ENABLE_SDK = (
    'if test -r "$RAYPOD_SDK/enable"; then . "$RAYPOD_SDK/enable"; '
    'else for part in "$RAYPOD_SDK"/*/enable.sh; do test -r "$part" && . "$part"; done; fi; '
)
# Runs in the interpreter of Ray: package versions (without imports, which take seconds) and a digest of raypod's files.
_PYTHON_FACTS = """
import hashlib, importlib.util, json, pathlib, platform, sys
try:
    from importlib.metadata import version
except ImportError:
    def version(name): return "?"
found = {}
for name in json.loads(sys.argv[1]):
    try:
        found[name] = version(name)
    except Exception:
        found[name] = "?" if importlib.util.find_spec(name.replace("-", "_")) else None
files = b""
spec = importlib.util.find_spec("raypod")
if spec is not None and spec.origin:
    folder = pathlib.Path(spec.origin).parent
    for path in sorted(folder.rglob("*.py")):
        if path.is_file() and not path.name.startswith("."):
            files += str(path.relative_to(folder)).encode() + hashlib.sha256(path.read_bytes()).digest()
print(json.dumps({"path": sys.executable, "version": platform.python_version(), "packages": found,
                  "raypod_sha256": hashlib.sha256(files).hexdigest() if files else None}))
"""


def facts(settings: Dict[str, Any]) -> Dict[str, Any]:
    """Return all facts that the settings request; an unknown fact is None or an error message."""
    environment = _login_environment(settings.get("sdk"))
    environment.update(settings.get("environment", {}))
    if settings.get("only") == "python":
        return {"python": _python(settings, environment)}
    return {
        "hostname": socket.gethostname(),
        "own_name": _own_name(),
        "user": getpass.getuser(),
        "cpus": len(os.sched_getaffinity(0)),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": _python(settings, environment),
        "tools": {name: shutil.which(name, path=environment.get("PATH")) for name in settings.get("tools", [])},
        "ipus": _ipus(environment),
        "partition": _partition(settings.get("partition"), environment),
        "interfaces": _interfaces(),
        "towards": {address: _source(address) for address in settings.get("peers", [])},
        "unreachable": _unreachable(settings.get("peers", [])),
        "listening": _listening(),
        "clusters": _clusters(),
        "folders": {name: _folder(path) for name, path in settings.get("folders", {}).items() if path},
        "token": _token(settings.get("token", "~/.ray/auth_token")),
        "threads": environment.get("OMP_NUM_THREADS"),
        "clock_s": time.time(),  # last: the reader compares it with the arrival time
    }


def _login_environment(sdk: Optional[str]) -> Dict[str, str]:
    """Return the environment of a login shell with the SDK enabled; this process's environment if the shell fails."""
    enable = _ENABLE_SDK if sdk else ""
    script = f"{{ source ~/.bashrc; {enable}}} >/dev/null 2>&1; echo '{_BEGIN}'; env -0"
    own = dict(os.environ, RAYPOD_SDK=os.path.expanduser(sdk)) if sdk else dict(os.environ)  # noqa: PTH111
    result = _run(["bash", "--login", "-i", "-c", script], own)
    lines = result["output"].partition(_BEGIN + "\n")[2].split("\0")
    found = dict(line.partition("=")[::2] for line in lines if "=" in line)
    return found or own


def _run(words: List[str], environment: Dict[str, str], folder: Optional[str] = None) -> Dict[str, Any]:
    """Run a tool, by default in the home folder, so that it imports nothing from the current folder."""
    try:
        done = subprocess.run(  # noqa: UP022 - Python 3.6 has no capture_output
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            timeout=_TOOL_S,
            cwd=folder or str(Path.home()),
            start_new_session=True,  # an interactive shell would take the terminal
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"exit_code": 124, "output": "", "error": f"no answer within {_TOOL_S:g} s"}
    except OSError as error:
        return {"exit_code": 127, "output": "", "error": str(error.strerror)}
    errors = done.stderr.decode(errors="replace").strip().splitlines()
    return {
        "exit_code": done.returncode,
        "output": done.stdout.decode(errors="replace"),
        "error": errors[-1] if errors and done.returncode else None,
    }


def _python(settings: Dict[str, Any], environment: Dict[str, str]) -> Dict[str, Any]:
    words = os.path.expanduser(settings.get("python") or "python3")  # noqa: PTH111
    name = shutil.which(words, path=environment.get("PATH"))
    if name is None:
        return {"error": f"{words} does not exist"}
    result = _run(
        [name, "-c", _PYTHON_FACTS, json.dumps(settings.get("packages", []))], environment, settings.get("cwd")
    )
    for line in reversed(result["output"].splitlines()):  # a sitecustomize can print other lines
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {"error": result["error"] or "no output"}


def _ipus(environment: Dict[str, str]) -> Optional[Dict[str, Any]]:
    """Return the number of visible IPUs; None without the SDK's tools.

    Inferred: the SDK's documentation does not state that `gc-info --ipu-count` prints a number.
    """
    if shutil.which("gc-info", path=environment.get("PATH")):
        result = _run(["gc-info", "--ipu-count"], environment)
        words = result["output"].split()
        return {"count": int(words[-1]) if words and words[-1].isdigit() else None, "error": result["error"]}
    if shutil.which("gc-monitor", path=environment.get("PATH")):
        result = _run(["gc-monitor", "--no-card-info"], environment)
        return {"count": None, "error": result["error"]}
    return None


def _partition(settings: Optional[Dict[str, Any]], environment: Dict[str, str]) -> Optional[Dict[str, Any]]:
    """Return the output of the vipu tool for a partition; None without a partition or without the tool."""
    if not settings or not shutil.which("vipu", path=environment.get("PATH")):
        return None
    where = ["--api-host", str(settings["server"]), "--api-port", str(settings["port"])]
    return _run(["vipu", *where, "get", "partition", str(settings["partition"])], environment)


def _interfaces() -> Dict[str, List[Any]]:
    """Return interface name -> [IPv4 address, prefix length]."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("256s", name.encode()))
            with contextlib.suppress(OSError):  # an interface without address
                address = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request.tobytes())[20:24]
                mask = fcntl.ioctl(probe.fileno(), _SIOCGIFNETMASK, request.tobytes())[20:24]
                found[name] = [socket.inet_ntoa(address), bin(int.from_bytes(mask, "big")).count("1")]
    return found


def _own_name() -> Dict[str, str]:
    """Return the first address of this host's own name on which a socket can listen; "" and the error without one."""
    cause = "no address"
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(socket.gethostname(), None, 0, socket.SOCK_STREAM):
            with contextlib.closing(socket.socket(family, kind, protocol)) as listener:
                try:
                    listener.bind(address)
                except OSError as error:
                    cause = str(error.strerror or error)
                else:
                    return {"address": str(address[0]), "error": ""}
    except OSError as error:
        cause = str(error.strerror or error)
    return {"address": "", "error": cause}


def _source(address: str) -> Optional[str]:
    """Return this host's source address for connections to another address."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # connecting a datagram socket sends nothing
        return str(probe.getsockname()[0])
    return None


def _unreachable(peers: List[str]) -> Dict[str, str]:
    """Return the peers that do not answer, with the error. A refused connection counts as an answer."""
    found = {}

    def connect(peer: str) -> None:
        try:
            socket.create_connection((peer, 22), timeout=_PEER_S).close()
        except ConnectionRefusedError:
            pass
        except OSError as error:
            found[peer] = str(error.strerror or error)

    threads = [threading.Thread(target=connect, args=(peer,), daemon=True) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _PEER_S)
    return found


def _listening() -> List[Dict[str, Any]]:
    """Return every listening TCP socket: address, port, and its process if this user may read it."""
    owners = _socket_owners()
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in _text(Path("/proc/net") / name).splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                address, _, port = words[1].partition(":")
                packed = b"".join(bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8))
                owner = owners.get(words[9], _UNKNOWN_OWNER)
                found.append(dict(owner, address=socket.inet_ntop(family, packed), port=int(port, 16)))
    return found


def _socket_owners() -> Dict[str, Dict[str, Any]]:
    """Return the process of each socket, by inode."""
    owners = {}
    for pid in _pids():
        links = []
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    links.append(os.readlink(str(entry)))
        sockets = [link[8:-1] for link in links if link.startswith("socket:[")]
        if sockets:
            program = _text(Path(f"/proc/{pid}/cmdline")).split("\0")[0]
            # A driver starts from a shell without the mark, but it has Ray's library mapped.
            is_ray = "/_raylet.so" in _text(Path(f"/proc/{pid}/maps"))
            owner = {"pid": pid, "program": program, "cluster": _cluster_of(pid), "is_ray": is_ray}
            owner["is_orphan"] = program.startswith("ray::") and not _has_raylet(pid)
            owners.update(dict.fromkeys(sockets, owner))
    return owners


def _cluster_of(pid: int) -> Optional[str]:
    """Return the cluster mark of a process or its nearest marked ancestor: Ray overwrites the mark of its agents."""
    for each in _ancestry(pid):
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{each}/environ").read_bytes().split(b"\0"):
                if entry.startswith(_MARK):
                    return entry[len(_MARK) :].decode(errors="replace")
    return None


def _has_raylet(pid: int) -> bool:
    """Return whether a raylet, or the template of one, has started a process: its agents and workers outlive it."""
    commands = [_text(Path(f"/proc/{each}/cmdline")).split("\0") for each in _ancestry(pid)]
    return any(words[0].endswith("/raylet") or words[1:2] and words[1].endswith(_TEMPLATE) for words in commands)


def _ancestry(pid: int) -> Iterator[int]:
    """Yield the pids of a process and of its ancestors."""
    seen = set()
    while pid > 0 and pid not in seen:
        seen.add(pid)
        yield pid
        words = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
        pid = int(words[1]) if len(words) > 1 else 0


def _clusters() -> List[Optional[str]]:
    """Return the cluster mark of every raylet on this host."""
    return [
        _cluster_of(pid) for pid in _pids() if _text(Path(f"/proc/{pid}/cmdline")).split("\0")[0].endswith("/raylet")
    ]


def _pids() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _folder(text: str) -> Dict[str, Any]:
    """Return the state of a folder; free space and permission are those of its nearest existing parent."""
    path = Path(os.path.expanduser(text))  # noqa: PTH111
    nearest = path
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    space = os.statvfs(str(nearest))
    return {
        "path": str(path),
        "exists": path.exists(),
        "is_folder": path.is_dir(),
        "is_empty": path.is_dir() and os.access(str(path), os.R_OK) and next(path.iterdir(), None) is None,
        "is_writable": nearest.is_dir() and os.access(str(nearest), os.W_OK | os.X_OK),
        "free_bytes": space.f_bavail * space.f_frsize,
        "total_bytes": space.f_blocks * space.f_frsize,
    }


def _token(text: str) -> Dict[str, Any]:
    """Return the state of the token file, and the hash of the token to compare hosts."""
    path = Path(os.path.expanduser(text))  # noqa: PTH111
    try:
        status, secret = path.stat(), path.read_bytes().strip()
    except OSError as error:
        return {"path": str(path), "error": str(error.strerror)}
    return {
        "path": str(path),
        "mode": f"{stat.S_IMODE(status.st_mode):04o}",
        "is_own": status.st_uid == os.getuid(),
        "sha256": hashlib.sha256(secret).hexdigest(),
    }


if __name__ == "__main__":
    print(json.dumps(facts(json.loads(sys.argv[1]))))  # noqa: T201 - the result
