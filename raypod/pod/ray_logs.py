"""Causes of a failed start in the logs of Ray's launcher, of its autoscaler and of a host's raylet."""

from __future__ import annotations

import math
import re
import time
from typing import Callable, Optional

from raypod.plan.cluster import Cluster, Host
from raypod.runtime import ssh
from raypod.system.command_line import printable

# RAY_TMPDIR: as in the cluster files of this repository, or the default. Another user's could link to any file.
_FOLDERS = "/tmp/ray-$(id -un)/ray /tmp/ray"
_MONITOR_LOG = "/ray/session_latest/logs/monitor.out"
_SHOWN = f"RAY_TMPDIR{_MONITOR_LOG}"
_OWN = "test -O $each || continue"
# Reads a log, and prints the lines since a time of this host ($since); lines without a time belong to those before.
_NEWER_LINES = """awk -v since="$since" '
match($0, /[0-9]+-[0-9][0-9]-[0-9][0-9] [0-9][0-9]:[0-9][0-9]:[0-9][0-9]/) && RSTART < 8 {
    is_new = substr($0, RSTART, RLENGTH) >= since
}
is_new'"""
_MAX_MESSAGE = 240
_READ_S = 30.0  # timeout of reading a log
_LAUNCHER_LINE = re.compile(
    r"\d{4}-\d\d-\d\d |(Shared c|C)onnection |Warning: Permanently"
)  # of Ray's launcher and ssh
_SUCCESS = re.compile(r"New status: up-to-date|succeeded|Applied config|The autoscaler took")
_LOG_HEADER = re.compile(r"==> (?P<path>.*) <==")
# Messages of the levels C and F abort the process. A raylet that receives SIGTERM also logs errors, at level E.
_RAYLET_ABORT = re.compile(r"\[[^\]]* [CF] \d+ \d+\] \(raylet\) \S+ +(?P<message>.*)")
_FAILED_CHECK = re.compile(r".*Check failed: \S+ ")
# raylet (Ray 2.60) aborts after a fixed time without the file of an agent.
_SLOW_AGENT = re.compile(r"Timed out waiting for file \S*_port_")
_SLOW_AGENT_TEXT = "its agents did not start within Ray's limit of 15 s: is the host overloaded?"


def why_missing(host: Host, cluster: Cluster, began_s: float) -> str:
    """Return why a host has not joined, from lines of logs since `began_s` (`time.monotonic`)."""

    def log_of(which: Host, script: Callable[[float], str]) -> ssh.Result:
        words = ["bash", "-c", script(time.monotonic() - began_s)]
        return ssh.run_on(which, cluster.ssh, words, timeout_s=_READ_S)

    done = log_of(host, raylet_logs_script)
    if not done.succeeded:
        return done.error
    cause = raylet_error(done.output)
    if cause is None:  # the head starts the workers
        cause = autoscaler_error(log_of(cluster.hosts[0], monitor_log_script).output, host.address)
    return f"is reachable; {cause}"


def launcher_error(log: str) -> str:
    """Return the most likely cause in a log.

    That is why a process of Ray aborted, or the last output, of a failed command on a host, else an error of Ray.
    """
    lines = [line for line in (printable(each).strip() for each in log.splitlines()) if line]
    failed = [at for at, line in enumerate(lines) if "New status: update-failed" in line]
    output = [line for line in lines[: (failed or [0])[-1]] if not _LAUNCHER_LINE.match(line)]
    errors = [line for line in lines if "Error" in line and "click.exceptions" not in line]
    rest = [line for line in lines if "VINFO" not in line]  # VINFO: full ssh commands
    aborts = [_FAILED_CHECK.sub("", line) for line in output if _FAILED_CHECK.match(line)]
    return (aborts or output or errors or rest or ["no output"])[-1][:_MAX_MESSAGE]


def monitor_log_script(since_s: float) -> str:
    """Return a shell script that prints what the autoscaler has logged in the last `since_s` seconds."""
    log = f'"${{each%/ray}}{_MONITOR_LOG}"'
    return (
        f"{_set_since(since_s)}; for each in {_FOLDERS}; do {_OWN}; "
        f"tail -qn 400 {log} 2>/dev/null | {_NEWER_LINES}; done; true"
    )


def autoscaler_error(log: str, address: str) -> str:
    """Return why the autoscaler has not started a worker, from what `monitor_log_script` prints."""
    lines = [line for line in log.splitlines() if not _SUCCESS.search(line)]
    about = [line for line in lines if address in line]
    if not about:
        return f"the autoscaler on the head has logged nothing about it since this command began ({_SHOWN})"
    text = "\n".join(lines)
    return f"the end of {_SHOWN} on the head: {launcher_error(text)}"


def raylet_logs_script(since_s: float) -> str:
    """Return a shell script that prints what raylets have logged in the last `since_s` seconds, the newest last."""
    return (
        f"{_set_since(since_s)}; for each in {_FOLDERS}; do {_OWN}; "
        "find $each/session_latest/logs/ -name 'raylet*.out' -newermt \"$since\" -exec ls -tr {} + 2>/dev/null; done | "
        f'while read -r log; do echo "==> $log <=="; tail -n 400 "$log" | {_NEWER_LINES}; done'
    )


def _set_since(seconds: float) -> str:
    return f"since=$(date -d '-{math.floor(seconds)} seconds' '+%F %T')"


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
