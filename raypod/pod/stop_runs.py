"""Before `raypod up` restarts Ray: the programs that use the cluster are named, and stopped only on request.

The GCS knows them all, on all hosts: trainings, launches, and any other Ray program.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Tuple

from raypod.errors import ClusterError
from raypod.plan.cluster import Cluster, Host
from raypod.plan.cluster_file import ClusterFile
from raypod.pod import active_runs, file_checks
from raypod.pod.collect_copies import Say
from raypod.runtime import ssh
from raypod.runtime.workers import gcs
from raypod.system.command_line import shortened

_MAX_COMMAND = 120  # characters
Driver = Dict[str, Any]


def make_way(cluster: Cluster, file: ClusterFile, stops: bool, say: Say) -> None:
    """Check that nothing uses the cluster, or with `stops`, stop what does; trainings save a checkpoint.

    What does not end is named in a line: the restart ends it.

    Raises:
        ClusterError: without `stops`, if programs use the cluster, or if that is unknown; another user's process has
            the port of the GCS.
    """
    drivers, problem, is_foreign = _drivers(cluster, file)
    if is_foreign:
        raise ClusterError(f"{cluster.name}: {problem}; two clusters need different ports in the start commands")
    if not drivers and not problem:
        return
    where = _by_host(cluster, drivers)
    names, runs = _names(cluster, where)
    if not stops:
        if not drivers:
            raise ClusterError(
                f"{cluster.name}: whether runs are active is unknown: {problem}; --stop-runs restarts Ray all the same"
            )
        number = f"{len(drivers)} active programs" if drivers[1:] else "an active program"
        summary = (
            f"{cluster.name}: a restart of Ray would end {number}; --stop-runs stops them first, trainings with a "
            "checkpoint; --no-restart leaves them alone"
        )
        raise ClusterError("\n  ".join([summary, *names]))
    for name, is_run in zip(names, runs):
        within_s = active_runs.STOP_S if is_run else active_runs.END_S
        say(f"stopping {name} (within {within_s:g} s{'' if is_run else ': no active run'})")
    left = _stop(cluster, where)
    for reason in left:
        say(f"warning: {reason}; the restart of Ray takes its cluster away")
    if problem:
        say(f"warning: whether runs are active is unknown: {problem}; the restart of Ray ends them")
    if any(runs) and not left:
        say("they have ended; once Ray runs again, the same command continues a training")


def is_running(cluster: Cluster, file: ClusterFile) -> bool:
    """Return whether Ray runs on the head; also if that is unknown, because it does not answer."""
    answer = _answer_of_head(cluster, file).json_object("drivers")
    return answer is None or bool(answer["runs"])


def _drivers(cluster: Cluster, file: ClusterFile) -> Tuple[List[Driver], str, bool]:
    """Return the programs that use the cluster, why they are unknown, and whether another user's process uses its port.

    No Ray on the head: there are none.
    """
    done = _answer_of_head(cluster, file)
    answer = done.json_object("drivers")
    if answer is None:
        return [], f"{cluster.hosts[0].name}: {done.error or 'no JSON in ' + done.excerpt}", False
    return answer["drivers"], answer["error"], answer["foreign"]


def _answer_of_head(cluster: Cluster, file: ClusterFile) -> ssh.Result:
    words, program = ["--drivers", str(cluster.gcs_address)], Path(gcs.__file__).read_text()
    return ssh.run_on(cluster.hosts[0], cluster.ssh, gcs_words(file, words), program, gcs.DRIVERS_S + ssh.SLACK_S)


def gcs_words(file: ClusterFile, words: List[str]) -> List[str]:
    """Return the command that runs `runtime/workers/gcs.py`, from stdin, on the head with the TLS of the cluster."""
    # A shell expands ~ and variables in the values, as it does in the start commands.
    tls = file_checks.tls_variables(file)
    return ["bash", "-c", " ".join([*(f"export {each};" for each in tls), 'exec python3 - "$@"']), "bash", *words]


def _by_host(cluster: Cluster, drivers: List[Driver]) -> Dict[Host, List[Driver]]:
    hosts = {host.address: host for host in cluster.hosts}
    found: Dict[Host, List[Driver]] = {}
    for each in drivers:
        host = hosts.get(each["address"]) or Host(each["address"], each["address"])
        found.setdefault(host, []).append(each)
    return found


def _names(cluster: Cluster, where: Dict[Host, List[Driver]]) -> Tuple[List[str], List[bool]]:
    """Return each program with its host, pid, run folder and command, and whether it has a run folder."""
    found = _on_hosts(cluster, where, "folders", ssh.SLACK_S)
    names, runs = [], []
    for host, drivers in where.items():
        folders = found[host.name].json_object("folders") or {"folders": {}}
        for each in drivers:
            folder = folders["folders"].get(str(each["pid"]))
            command = active_runs.without_values(each["entrypoint"])[:_MAX_COMMAND]
            names.append(f"{host.name}: {f'{folder} ' if folder else ''}(pid {each['pid']}: {command})")
            runs.append(folder is not None)
    return names, runs


def _stop(cluster: Cluster, where: Dict[Host, List[Driver]]) -> List[str]:
    """Stop the programs; return those that run on, with the reasons."""
    found, left = _on_hosts(cluster, where, "stop", active_runs.STOP_S + ssh.SLACK_S), []
    for host, drivers in where.items():
        answer = found[host.name].json_object("stop")
        if answer is None:
            left.append(f"{host.name}: {shortened([str(each['pid']) for each in drivers])}: {found[host.name].error}")
        else:
            left += [f"{host.name}: pid {pid}: {reason}" for pid, reason in answer["stop"].items()]
    return left


def _on_hosts(cluster: Cluster, where: Dict[Host, List[Driver]], mode: str, within_s: float) -> Dict[str, ssh.Result]:
    program = Path(active_runs.__file__).read_text()

    def run(host: Host) -> ssh.Result:
        # Not on the command line, which every user of the hosts can read: those of the drivers can have secrets.
        drivers = f"import sys; sys.argv.append({json.dumps(where[host])!r})\n"
        return ssh.run_on(host, cluster.ssh, ["python3", "-", mode], drivers + program, within_s)

    return ssh.map_hosts(list(where), run)
