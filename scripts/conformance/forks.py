"""A process that imports the SDK once and runs pytest in a fork of itself for each request, as imports take seconds.

Requests and answers are lines of JSON on the standard input and output; `Forks` is the side of the requester.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, List, Optional

_PRELOADED = ("pytest", "poptorch", "torch_geometric")
_POLL_S = 0.02


class Forks:
    """Runs pytest with the interpreter of this process. Use it in one thread."""

    def __init__(self, folder: Path, environment: Dict[str, str]) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "conformance.forks"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            universal_newlines=True,
        )

    def run(self, arguments: List[str], environment: Dict[str, str], output: Path, limit_s: float) -> Optional[int]:
        """The exit status of pytest, negative for a signal; None if it did not end within the limit."""
        request = {"arguments": arguments, "environment": environment, "output": str(output), "limit_s": limit_s}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            raise RuntimeError("the process that imports the SDK has ended: see its error above")
        status: Optional[int] = json.loads(answer)
        return status

    def close(self) -> None:
        """Ends the process, and the processes of a running test."""
        with self._server:  # closes the pipes and waits
            self._server.terminate()


def _serve() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for module in _PRELOADED:
        if importlib.util.find_spec(module):
            importlib.import_module(module)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(_run_fork(**request)), flush=True)


def _run_fork(arguments: List[str], environment: Dict[str, str], output: str, limit_s: float) -> Optional[int]:
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _run_pytest(arguments, environment, output)
    try:
        return _status_within(child, limit_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # with the processes that the tests have left
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def _run_pytest(arguments: List[str], environment: Dict[str, str], output: str) -> None:
    import pytest  # the requester needs none

    os.environ.update(environment)
    with Path(output).open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    status = int(pytest.main(arguments))
    sys.stdout.flush()
    os._exit(status)


def _status_within(child: int, limit_s: float) -> Optional[int]:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        time.sleep(_POLL_S)
    return None


if __name__ == "__main__":
    _serve()
