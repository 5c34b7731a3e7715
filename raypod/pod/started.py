"""The checks after Ray's start: has every host joined, and do they run the same sources with a working interpreter?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Sequence

from raypod.errors import RunError
from raypod.plan.cluster import Cluster, Host
from raypod.plan.cluster_file import ClusterFile
from raypod.pod import file_checks, loaded_sources, probe, ray_logs, stop_cluster, stop_runs
from raypod.pod.collect_copies import Say
from raypod.runtime import ssh
from raypod.runtime.workers import gcs
from raypod.system.command_line import shortened

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
    reasons = ssh.map_hosts(missing, lambda host: other.get(host.name) or ray_logs.why_missing(host, cluster, began_s))
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
