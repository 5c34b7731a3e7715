"""A log file on another host, followed by `tail -F` over ssh while the user looks at it."""

from __future__ import annotations

import collections
import shlex
import subprocess
import threading
from typing import Deque, List, Optional

from raypod.observe.monitor.style import clean_line
from raypod.plan.cluster import Cluster, Host
from raypod.runtime import ssh

_FIRST_LINES, _KEPT = 200, 1000
_MAX_LINE = 1 << 16
_END_S = 3.0


class RemoteLog:
    """The newest lines of the file; the reason as the last one when the connection has ended."""

    def __init__(self, cluster: Cluster, host: Host, path: str) -> None:
        self._lines: Deque[str] = collections.deque(maxlen=_KEPT)
        tail = shlex.join(["tail", "-n", str(_FIRST_LINES), "-F", "--", path])
        command = [*ssh.ssh_command(host, cluster.ssh), f"exec {tail} 2>&1"]
        self._process: Optional[subprocess.Popen[bytes]] = None
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        except OSError as error:
            self._lines.append(f"ssh: {error.strerror}")
            return
        self._thread = threading.Thread(target=self._read, args=(self._process,), name="remote log", daemon=True)
        self._thread.start()

    def lines(self) -> List[str]:
        """Return the newest lines."""
        return list(self._lines)

    def close(self) -> None:
        """End the connection."""
        if self._process is not None:
            self._process.terminate()
            self._thread.join(_END_S)

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        with process:
            assert process.stdout is not None
            for line in iter(lambda: process.stdout.readline(_MAX_LINE), b""):  # type: ignore[union-attr]
                self._lines.append(clean_line(line.decode(errors="replace")))
        self._lines.append(f"(the connection has ended with exit code {process.returncode})")
