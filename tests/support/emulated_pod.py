"""Run `scripts/pod.sh` from tests: a pod whose hosts are network, mount and pid namespaces of this machine."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, Iterator, List, Optional, Sequence

from tests.support import ROOT

SCRIPT = str(ROOT / "scripts" / "pod.sh")
NETWORK = "10.77.0"
TOKENS_SINCE = (2, 52)
# A raylet ends if its agents need more than 15 s to start, a fixed limit of Ray. The processes of a start command take
# precedence over the other tests of a busy machine: with autogroups (sched(7)), the nice value of a session counts.
PRIORITY = "{ echo -5 >/proc/self/autogroup; } 2>/dev/null; "


def skip_reason() -> Optional[str]:
    """Return why no pod can be created on this machine, or None."""
    if os.getuid() != 0:
        return "network namespaces need root"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    tools = ("ip", "tc", "unshare", "nsenter", "sshd", "rsync")
    missing = [tool for tool in tools if not shutil.which(tool, path=path)]
    if missing:
        return f"missing: {', '.join(missing)}"
    if tuple(int(part) for part in version("ray").split(".")[:2]) < TOKENS_SINCE:
        return f"Ray {version('ray')} has no token authentication"
    test = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    return None if test.returncode == 0 else f"cannot create namespaces: {test.stderr.decode().strip()}"


class EmulatedPod:
    """A pod that runs until `down` is called."""

    def __init__(self, name: str, hosts: int, shared: Path, venv: str = sys.prefix) -> None:
        """Start the pod.

        Args:
            shared: a folder that all hosts share, like a network file system. Python modules in its folder `site` can
                be imported on all hosts.
            venv: the Python environment of all hosts.
        """
        # Every raylet measures the memory of the whole machine.
        settings = {"ENV": f"PYTHONPATH={ROOT}:{shared}/site RAY_memory_monitor_refresh_ms=0", "HOSTS": "debian"}
        settings.update(NAME=name, NET=NETWORK, SHARE=f"{ROOT}:{shared}", VENV=venv)
        self._environment = {**os.environ, **{f"POD_{key}": value for key, value in settings.items()}}
        self.run("up", str(hosts))

    def run(self, *words: str, within_s: float = 60, check: bool = True) -> str:
        """Run a command of pod.sh with a timeout; return its stdout and stderr."""
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        line, environment = [SCRIPT, *words], self._environment
        done = subprocess.run(line, env=environment, timeout=within_s, check=False, **streams)
        text = done.stdout.decode(errors="replace")
        assert done.returncode == 0 or not check, f"{words} failed with exit code {done.returncode}:\n{text[-4000:]}"
        return text

    def start(self, host: int, command: str, output: Path) -> subprocess.Popen[bytes]:
        """Start a command line in a login shell of a host, with its output in a file."""
        line = [SCRIPT, "on", str(host), "bash", "-lc", command]
        with output.open("wb") as file:
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            return subprocess.Popen(line, env=self._environment, **streams)

    def listening(self, host: int) -> List[int]:
        text = self.run("on", str(host), "cat", "/proc/net/tcp", "/proc/net/tcp6")
        rows = [line.split() for line in text.splitlines()]
        places = {row[1] for row in rows if len(row) > 3 and row[3] == "0A" and not row[1].startswith("0100007F:")}
        return sorted({int(place.rpartition(":")[2], 16) for place in places})

    def down(self) -> None:
        self.run("down")


def address(host: int) -> str:
    return f"{NETWORK}.{10 + host}"


def cluster_file(hosts: int, head: int = 1, lost: Sequence[int] = ()) -> str:
    """Return the cluster file of hosts without IPUs with this pod's addresses, and limits for a single machine.

    Its hosts are 1 to `hosts` without those that are `lost`.
    """
    text = (ROOT / "cluster" / "emulated-pod.yaml").read_text()
    workers = [host for host in range(1, hosts + 1) if host not in (head, *lost)]
    listed = ", ".join(map(address, workers))
    text = text.replace("worker_ips: [10.0.0.12, 10.0.0.13]", f"worker_ips: [{listed}]")
    text = re.sub(r"(?m)^(m.._workers): 2", rf"\1: {len(workers)}", text)
    text = text.replace("10.0.0.11", address(head)).replace("10.0.0.", f"{NETWORK}.")
    text = text.replace("ssh_user: ubuntu", "ssh_user: root").replace("=500000000", "=80000000")
    text = text.replace("    python ~/raypod", f"    {PRIORITY}python ~/raypod")
    return text.replace("ray start ", "ray start --num-cpus=1 ")


def copy_source(folder: Path, hosts: int) -> None:
    """Copy raypod's source to a folder, with a `cluster/pod64.yaml` that describes this pod."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(str(ROOT / name), str(folder / name))
    shutil.copytree(str(ROOT / "configs"), str(folder / "configs"))
    shutil.copytree(str(ROOT / "raypod"), str(folder / "raypod"), ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "cluster").mkdir()
    (folder / "cluster" / "pod64.yaml").write_text(cluster_file(hosts))


def operate(pod: EmulatedPod, shared: Path, start: str, within_s: float = 60) -> str:
    """Return the output of the command of docs/how-to/pods.md that begins with `start`, on the operator in `shared`."""
    return pod.run("op", "bash", "-c", f"cd {shared}\n{documented_command(start)}", within_s=within_s)


def documented_command(start: str) -> str:
    section = (ROOT / "docs" / "how-to/pods.md").read_text().partition("\n## A pod on one machine")[0]
    (line,) = [line for line in section.splitlines() if line.startswith(start)]
    return line


@contextlib.contextmanager
def train_here(folder: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Train on this host, with run folder `folder`/run and output `folder`/out."""
    line = [sys.executable, "-m", "raypod.train", *flags, "--run-dir", str(folder / "run")]
    # A separate temporary folder, so that it joins no other Ray; its path is short because of Ray's sockets.
    log = folder / "out"
    with log.open("wb") as out, tempfile.TemporaryDirectory(prefix="ray") as temporary:
        environment = {**os.environ, "RAY_TMPDIR": temporary}
        command = subprocess.Popen(line, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield command
        finally:
            command.terminate()
            command.wait(60)
