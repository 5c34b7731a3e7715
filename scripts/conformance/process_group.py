"""Ends a process group within a bound."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess


def end(leader: subprocess.Popen[bytes], grace_s: float) -> None:
    """Ends a group: SIGTERM, then SIGKILL when the leader has ended, or after the grace period at the latest."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        leader.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
