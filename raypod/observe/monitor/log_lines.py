"""The last lines of log files that grow, on this host and, by `tail -F` over ssh, on others."""

from __future__ import annotations

import collections
import contextlib
import shlex
import subprocess
import threading
from pathlib import Path
from typing import Deque, Dict, List, Optional

from raypod.observe.monitor.style import clean, clean_line
from raypod.plan.cluster import Cluster, Host
from raypod.runs.growing_file import GrowingFile
from raypod.runtime import ssh

_TAIL_BYTES = 65536  # are read of a file at first
_KEPT = 1000  # lines


def tail_begin(path: Path, tail_bytes: int) -> int:
    """Return the offset of the last bytes of a file; 0 if it is shorter, or there is none."""
    try:
        return max(0, path.stat().st_size - tail_bytes)
    except OSError:
        return 0


class LogTail:
    """The newest lines of a file, oldest first; empty while it does not exist."""

    def __init__(self, path: Path, kept: int = _KEPT, tail_bytes: int = _TAIL_BYTES) -> None:
        self._lines: Deque[str] = collections.deque(maxlen=kept)
        begin = tail_begin(path, tail_bytes)
        self._is_cut = begin > 0
        self._file = GrowingFile(path, begin, max_bytes=1 << 20)

    def lines(self) -> List[str]:
        """Read what is new; return the newest lines."""
        with contextlib.suppress(OSError):  # removed, or not readable
            new, restarted = self._file.read()
            if restarted:
                self._lines.clear()
            elif self._is_cut and new:
                new, self._is_cut = new[1:], False  # the first one is incomplete
            self._lines.extend(clean_line(line.decode(errors="replace")) for line in new)
        return list(self._lines)

    def close(self) -> None:
        """Nothing is open between two reads."""


class LastLines:
    """The last line that is not empty, of several files."""

    def __init__(self) -> None:
        self._tails: Dict[str, LogTail] = {}

    def of(self, path: Optional[str], since_s: float = 0.0) -> Optional[str]:
        """Return the last line of a file; None if there is none, or if nothing was written since a Unix time."""
        try:
            if not path or Path(path).stat().st_mtime < since_s:
                return None
        except OSError:
            return None
        tail = self._tails.get(path)
        if tail is None:
            tail = self._tails[path] = LogTail(Path(path), kept=20, tail_bytes=4096)
        return next((clean(line) for line in reversed(tail.lines()) if line), None)


_FIRST_LINES = 200
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
