"""Driving `scripts/pod.sh` from tests: hosts that are real as far as their processes can tell."""

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


def why_not() -> Optional[str]:
    """Why no such pod can be made here, if so."""
    if os.getuid() != 0:
        return "network namespaces need root"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [
        tool for tool in ("ip", "tc", "unshare", "nsenter", "sshd", "rsync") if not shutil.which(tool, path=path)
    ]
    if missing:
        return f"missing: {', '.join(missing)}"
    if tuple(int(part) for part in version("ray").split(".")[:2]) < TOKENS_SINCE:
        return f"Ray {version('ray')} has no token"
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.decode().strip()}"


class EmulatedPod:
    """One pod, up from its birth until `down`."""

    def __init__(self, name: str, hosts: int, shared: Path) -> None:
        """`shared`: a folder that all hosts see, as they would one of a file server."""
        self._environment = {
            **os.environ,
            "POD_NAME": name,
            "POD_NET": NETWORK,
            "POD_SHARE": f"{REPOSITORY}:{shared}",
            "POD_VENV": sys.prefix,
            # Every raylet looks at the memory of the whole machine.
            "POD_ENV": f"PYTHONPATH={REPOSITORY} RAY_memory_monitor_refresh_ms=0",
        }
        self.run("up", str(hosts))

    def run(self, *words: str, within_s: float = 60, check: bool = True) -> str:
        """Run a command of pod.sh within a bound; its output, stdout and stderr together."""
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
        assert done.returncode == 0 or not check, f"{words} ended with {done.returncode}:\n{text[-4000:]}"
        return text

    def start(self, host: int, command: str, output: Path) -> subprocess.Popen[bytes]:
        """Start a command line in a login shell of a host; its output goes to a file."""
        line = [SCRIPT, "on", str(host), "bash", "-lc", command]
        with output.open("wb") as file:
            return subprocess.Popen(
                line, env=self._environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )

    def listening(self, host: int) -> List[int]:
        """The TCP ports of a host on which something listens for other hosts."""
        text = self.run("on", str(host), "cat", "/proc/net/tcp", "/proc/net/tcp6")
        found: Dict[int, None] = {}
        for line in text.splitlines():
            words = line.split()
            if len(words) > 3 and words[3] == "0A" and not words[1].startswith("0100007F:"):
                found[int(words[1].rpartition(":")[2], 16)] = None
        return sorted(found)

    def down(self) -> None:
        """End it, with everything in it."""
        self.run("down")


def address(host: int) -> str:
    """The address of a host."""
    return f"{NETWORK}.{10 + host}"
