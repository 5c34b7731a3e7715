"""Another host of the cluster: the output of `raypod monitor --json --follow` there, through one ssh connection."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from typing import IO, List, Optional, Tuple

from raypod.observe.monitor.model import HostFacts, Run, from_json
from raypod.observe.monitor.words import clean
from raypod.plan.cluster import Cluster, Host
from raypod.runtime import ssh
from raypod.system.files import parse_json

_RETRY_S = 10.0
_SILENT_INTERVALS, _SILENT_S = 3, 5.0  # without a line: the host is shown as silent
_END_S = 3.0
_MAX_LINE = 64 << 20
_NO_CONNECTION = 255  # the exit code of ssh itself


class RemoteHost:
    """The newest known state of a host. A connection that ends is opened again after ten seconds."""

    def __init__(self, cluster: Cluster, host: Host, interval_s: float) -> None:
        self.host = host
        self.first_try = threading.Event()
        self._interval_s, self._ssh = interval_s, cluster.ssh
        words = [cluster.python, "-m", "raypod", "monitor", "--json", "--follow", "--interval", f"{interval_s:g}"]
        self._command = [*ssh.ssh_command(host, cluster.ssh), ssh.login_command(words)]
        self._state: Optional[Tuple[HostFacts, List[Run]]] = None
        self._received_s = time.monotonic()
        self._problem = "connecting"
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"monitor of {host.name}", daemon=True)
        self._thread.start()

    def poll(self) -> Tuple[HostFacts, List[Run], Optional[str]]:
        """Return the newest facts and runs of the host, and why they are not current, if so."""
        facts, runs = self._state or (HostFacts(self.host.name), [])
        problem, silent_s = self._problem, time.monotonic() - self._received_s
        if not problem and silent_s > max(_SILENT_S, _SILENT_INTERVALS * self._interval_s):
            problem = f"no data for {silent_s:.0f} s"
        return facts, runs, problem or None

    def stop(self) -> None:
        """End the connection."""
        self._stopped.set()
        process = self._process
        if process is not None:
            process.terminate()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join(_END_S + 1)

    def _loop(self) -> None:
        while not self._stopped.is_set():
            self._problem = self._problem or "connecting"
            try:
                self._problem = self._read_all()
            except OSError as error:
                self._problem = f"ssh: {error.strerror}"
            self.first_try.set()
            self._stopped.wait(_RETRY_S)

    def _read_all(self) -> str:
        """Read until the connection ends; return why it did."""
        with subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            self._process = process
            errors: List[str] = []
            assert process.stdout is not None
            assert process.stderr is not None
            reader = threading.Thread(target=_collect, args=(process.stderr, errors), daemon=True)
            reader.start()
            if self._stopped.is_set():
                process.terminate()
            for line in iter(lambda: process.stdout.readline(_MAX_LINE), b""):  # type: ignore[union-attr]
                self._take(line)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
            reader.join(_END_S)
        self._process = None
        code = process.returncode
        if code == _NO_CONNECTION:
            cause = errors[-1] if errors else "ssh: no connection"
            return f"unreachable ({cause}{ssh.passphrase_hint(cause, self._ssh)})"
        return errors[-1] if errors else f"the monitor there ended with exit code {code}"

    def _take(self, line: bytes) -> None:
        """Store the state of a line; login shells print others."""
        text = line.decode(errors="replace")
        try:
            self._state = from_json(parse_json(text[text.index("{") :]))
        except (ValueError, TypeError, KeyError, AttributeError):
            return
        self._received_s, self._problem = time.monotonic(), ""
        self.first_try.set()


def _collect(stream: IO[bytes], lines: List[str]) -> None:
    """Keep the last line that is not empty."""
    for line in iter(lambda: stream.readline(4096), b""):
        text = clean(line.decode(errors="replace"))
        if text:
            lines[:] = [text]
