"""The checks after Ray's start: which hosts have joined, which sources they run, and why a start failed."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

from raypod.errors import RunError
from raypod.plan.cluster import Cluster, Host
from raypod.plan.cluster_file import ClusterFile
from raypod.pod import file_checks, loaded_sources, probe, stop_cluster, stop_runs
from raypod.pod.collect_copies import Say
from raypod.runtime import ssh
from raypod.runtime.workers import gcs
from raypod.system.command_line import printable, shortened

_MAX_CHANGES = 3  # in a message


def wait_for_hosts(cluster: Cluster, file: ClusterFile, within_s: float, began_s: float, say: Say) -> None:
    """Wait until all hosts have joined; RunError names those that have not, each with the cause.

    `began_s`: when the command began (`time.monotonic`); the cause is newer.
    """
    answer = _missing_hosts(cluster, file, 0)
    if answer["missing"] and within_s > 0:
        say(
            f"waiting up to {within_s:g} s for {len(answer['missing'])} of {len(cluster.hosts)} hosts: "
            f"{shortened(answer['missing'])} (--wait-hosts changes it)"
        )
        answer = _missing_hosts(cluster, file, within_s)
    if not answer["missing"]:
        return
    missing = [host for host in cluster.hosts if host.address in answer["missing"]]
    other = _other_versions(cluster, missing)  # Ray's logs do not name them
    reasons = ssh.map_hosts(missing, lambda host: other.get(host.name) or why_missing(host, cluster, began_s))
    lines = [f"{name}: {reason}" for name, reason in reasons.items()]
    lines += map(str, file_checks.key_warnings(file))
    gcs_error = f" ({answer['error']})" if answer["error"] else ""
    summary = f"{len(reasons)} of {len(cluster.hosts)} hosts did not join within {within_s:g} s (--wait-hosts)"
    raise RunError("\n  ".join([f"{cluster.name}: {summary}{gcs_error}", *lines]))


def _other_versions(cluster: Cluster, hosts: Sequence[Host]) -> Dict[str, str]:
    """Return which of `hosts` have another version of Ray or Python than the head, which cannot join, and both."""
    versions = {}
    for name, done in _interpreters(cluster, [cluster.hosts[0], *hosts], ["ray"]).items():
        facts = (done.json_object("python") or {}).get("python", {})
        if "error" not in facts and facts.get("packages", {}).get("ray"):
            versions[name] = f"Ray {facts['packages']['ray']} with Python {facts['version']}"
    head = cluster.hosts[0].name
    return {
        name: f"has {found}, but the head {versions[head]}: install the same versions"
        for name, found in versions.items()
        if head in versions and found != versions[head]
    }


def _interpreters(cluster: Cluster, hosts: Sequence[Host], packages: Sequence[str] = ()) -> Dict[str, ssh.Result]:
    """Return what `probe` finds about the interpreter of the cluster file on hosts, with the versions of packages."""
    settings = {"only": "python", "python": cluster.python, "sdk": cluster.sdk, "packages": packages}
    words, program = ["python3", "-", json.dumps(settings)], Path(probe.__file__).read_text()
    return ssh.map_hosts(hosts, lambda host: ssh.run_on(host, cluster.ssh, words, program, ssh.SLACK_S))


def _missing_hosts(cluster: Cluster, file: ClusterFile, within_s: float) -> Dict[str, Any]:
    """Return the addresses that have not joined within a time (`missing`), and the last error of the GCS (`error`).

    The requests to the GCS run on the head, where its port is reachable.
    """
    head, names = cluster.hosts[0], [host.address for host in cluster.hosts]
    words = stop_runs.gcs_words(file, [str(cluster.gcs_address), str(within_s), *names])
    done = ssh.run_on(head, cluster.ssh, words, Path(gcs.__file__).read_text(), within_s + ssh.SLACK_S)
    if not done.succeeded:
        raise RunError(f"cannot list the hosts of the cluster on {head.name}: {done.error}")
    answer = done.json_object("missing")
    if answer is None:
        raise RunError(f"cannot list the hosts of the cluster on {head.name}: no JSON in {done.excerpt}")
    return answer


def compare_sources(cluster: Cluster, file: ClusterFile, restart: str, mode: str, say: Say) -> None:
    """Record the sources and packages with which Ray was started on each host, or say which are newer than those."""
    folders = [target for target in file.top.value("file_mounts") or {} if target != file_checks.HOST_TOKEN_PATH]
    words, program = ["python3", "-", mode, cluster.name, *folders], Path(loaded_sources.__file__).read_text()
    found = ssh.map_hosts(
        cluster.hosts, lambda host: ssh.run_on(host, cluster.ssh, words, program, loaded_sources.TIMEOUT_S)
    )
    changes: Dict[str, None] = {}
    newer, older = [], []
    for name, done in found.items():
        answer = done.json_object("raylet")
        if answer is None or answer["raylet"] is None:
            cause = done.error or f"no raylet has {stop_cluster.MARK}={cluster.name} in its environment"
            say(f"warning: {name}: cannot compare the sources with those that Ray was started with: {cause}")
        elif answer["changes"]:
            newer.append(name)
            changes.update(dict.fromkeys(answer["changes"]))
        else:
            older.append(name)
    if newer:
        rest = f" and {len(changes) - _MAX_CHANGES} more" if len(changes) > _MAX_CHANGES else ""
        others = f" (but not on {', '.join(older)})" if older else ""
        say(
            f"warning: changed on {', '.join(newer)}{others} since Ray was started: "
            f"{', '.join(list(changes)[:_MAX_CHANGES])}{rest}; running processes keep what they have loaded: "
            f"restart Ray with `{restart}`"
        )


def check_python(cluster: Cluster, file: ClusterFile, say: Say) -> None:
    """Warn of the hosts on which the interpreter of the cluster file does not run; `ray up` does not use it."""
    found = _interpreters(cluster, cluster.hosts)
    failed: Dict[str, List[str]] = {}
    for name, done in found.items():
        answer = done.json_object("python")
        if answer is None:
            cause = f"no JSON in {done.excerpt}" if done.succeeded else done.error
            say(f"warning: {name}: whether {cluster.python} exists was not checked: {cause}")
        elif "error" in answer["python"]:
            failed.setdefault(answer["python"]["error"], []).append(name)
    for error, names in failed.items():
        text = error if cluster.python in error else f"{cluster.python}: {error}"
        where = file_checks.python_setting(file)
        say(f"warning: {shortened(names)}: {text}; correct {where}, or setup_commands")


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
