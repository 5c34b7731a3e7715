"""Run `scripts/pod.sh` from tests: a pod whose hosts are network, mount and pid namespaces of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Dict, List, Optional

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SCRIPT = str(REPOSITORY / "scripts" / "pod.sh")
NETWORK = "10.77.0"
TOKENS_SINCE = (2, 52)


def skip_reason() -> Optional[str]:
    """Return why no pod can be created on this machine, or None."""
    if os.getuid() != 0:
        return "network namespaces need root"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [
        tool for tool in ("ip", "tc", "unshare", "nsenter", "sshd", "rsync") if not shutil.which(tool, path=path)
    ]
    if missing:
        return f"missing: {', '.join(missing)}"
    if tuple(int(part) for part in version("ray").split(".")[:2]) < TOKENS_SINCE:
        return f"Ray {version('ray')} has no token authentication"
    test = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    return None if test.returncode == 0 else f"cannot create namespaces: {test.stderr.decode().strip()}"


class EmulatedPod:
    """A pod that runs until `down` is called."""

    def __init__(self, name: str, hosts: int, shared: Path) -> None:
        """Start the pod; `shared` is a folder that all hosts share, like a network file system."""
        self._environment = {
            **os.environ,
            "POD_NAME": name,
            "POD_NET": NETWORK,
            "POD_SHARE": f"{REPOSITORY}:{shared}",
            "POD_VENV": sys.prefix,
            # Every raylet measures the memory of the whole machine.
            "POD_ENV": f"PYTHONPATH={REPOSITORY} RAY_memory_monitor_refresh_ms=0",
        }
        self.run("up", str(hosts))

    def run(self, *words: str, within_s: float = 60, check: bool = True) -> str:
        """Run a command of pod.sh with a timeout; return its stdout and stderr."""
        done = subprocess.run(
            [SCRIPT, *words],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=within_s,
            check=False,
        )
        text = done.stdout.decode(errors="replace")
        assert done.returncode == 0 or not check, f"{words} failed with exit code {done.returncode}:\n{text[-4000:]}"
        return text

    def start(self, host: int, command: str, output: Path) -> subprocess.Popen[bytes]:
        """Start a command line in a login shell of a host, with its output in a file."""
        line = [SCRIPT, "on", str(host), "bash", "-lc", command]
        with output.open("wb") as file:
            return subprocess.Popen(
                line, env=self._environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )

    def listening(self, host: int) -> List[int]:
        """Return the TCP ports of a host that are open to other hosts."""
        text = self.run("on", str(host), "cat", "/proc/net/tcp", "/proc/net/tcp6")
        found: Dict[int, None] = {}
        for line in text.splitlines():
            words = line.split()
            if len(words) > 3 and words[3] == "0A" and not words[1].startswith("0100007F:"):
                found[int(words[1].rpartition(":")[2], 16)] = None
        return sorted(found)

    def down(self) -> None:
        """Stop the pod with all its processes."""
        self.run("down")


def address(host: int) -> str:
    """Return the address of a host."""
    return f"{NETWORK}.{10 + host}"
