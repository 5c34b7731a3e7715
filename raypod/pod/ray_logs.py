"""Causes of a failed start in the logs of Ray's launcher, of its autoscaler and of a host's raylet."""

from __future__ import annotations

import math
import re
from typing import Optional

from raypod.cli import printable

# RAY_TMPDIR: as in the cluster files of this repository, or the default. Another user's could link to any file.
_FOLDERS = "/tmp/ray-$(id -un)/ray /tmp/ray"
MONITOR_LOG = "/ray/session_latest/logs/monitor.out"
_OWN = "test -O $each || continue"
MONITOR_LOG_SCRIPT = (
    f"for each in {_FOLDERS}; do {_OWN}; tail -qn 400 ${{each%/ray}}{MONITOR_LOG} 2>/dev/null; done; true"
)
_MAX_MESSAGE = 240
_LAUNCHER_LINE = re.compile(r"\d{4}-\d\d-\d\d |Shared connection|Warning: Permanently")  # of Ray's launcher and ssh
_LOG_HEADER = re.compile(r"==> (?P<path>.*) <==")
# Messages of the levels C and F abort the process. A raylet that receives SIGTERM also logs errors, at level E.
_RAYLET_ABORT = re.compile(r"\[[^\]]* [CF] \d+ \d+\] \(raylet\) \S+ +(?P<message>.*)")
_FAILED_CHECK = re.compile(r".*Check failed: \S+ ")
# raylet (Ray 2.60) aborts after a fixed time without the file of an agent.
_SLOW_AGENT = re.compile(r"Timed out waiting for file \S*_port_")
_SLOW_AGENT_TEXT = "its agents did not start within Ray's limit of 15 s: is the host overloaded?"


def launcher_error(log: str) -> str:
    """Return the most likely cause in a log: the last output of a failed command on a host, else an error of Ray."""
    lines = [line for line in (printable(each).strip() for each in log.splitlines()) if line]
    failed = [at for at, line in enumerate(lines) if "New status: update-failed" in line]
    output = [line for line in lines[: (failed or [0])[-1]] if not _LAUNCHER_LINE.match(line)]
    errors = [line for line in lines if "Error" in line and "click.exceptions" not in line]
    rest = [line for line in lines if "VINFO" not in line]  # VINFO: full ssh commands
    return (output or errors or rest or ["no output"])[-1][:_MAX_MESSAGE]


def raylet_logs_script(since_s: float) -> str:
    """Return a shell script that prints the ends of raylets' logs of the last `since_s` seconds, the newest last."""
    recent = f"-name 'raylet*.out' -mmin -{math.ceil(since_s / 60)}"
    return (
        f"for each in {_FOLDERS}; do {_OWN}; find $each/session_latest/logs/ {recent} "
        '-exec ls -tr {} + 2>/dev/null; done | while read -r log; do tail -v -n 400 "$log"; done'
    )


def raylet_error(logs: str) -> Optional[str]:
    """Return why a host's newest raylet that failed has ended, and its log, from what `raylet_logs_script` prints."""
    path, found = "", None
    for line in logs.splitlines():
        header, end = _LOG_HEADER.match(line), _RAYLET_ABORT.match(line)
        if header:
            path = header.group("path")
        if end:
            found = (_FAILED_CHECK.sub("", end.group("message")), path)
    if found is None:
        return None
    message = _SLOW_AGENT_TEXT if _SLOW_AGENT.search(found[0]) else found[0][:_MAX_MESSAGE]
    return f"raylet ended there: {message} (log: {found[1]})"
