"""Start a module of raypod as a process with a session of its own, and end all processes of that session."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Optional, Sequence

import raypod
from raypod.system.files import open_to_append

_KILLED_S = 10.0  # for a process that was killed to end


def start_module(module: str, arguments: Sequence[str], log: Optional[Path]) -> subprocess.Popen[bytes]:
    """Start `python -m module arguments`. Its standard input is a pipe, and its output is appended to `log`.

    Without a log its standard output is a pipe, too, and its errors go to those of this process.

    Raises:
        OSError: the log cannot be written, or the process cannot be started.
    """
    paths = [str(Path(raypod.__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    with contextlib.ExitStack() as stack:
        output = None if log is None else stack.enter_context(os.fdopen(open_to_append(log), "ab"))
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if output is None else output,
            stderr=None if output is None else subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            start_new_session=True,
        )


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a process of `start_module` and those that it has started, which have its session.

    One that waits for a disk or network file system in the kernel ends when that answers: it is awaited for 10 s.
    """
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    # The number is reserved until the process is awaited, and while its group has members; then it is free for others.
    if process.returncode is None or not Path(f"/proc/{process.pid}").exists():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_S)
