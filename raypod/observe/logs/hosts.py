"""The hosts on which the instances of a run wrote their logs, from `plan.json` and `events.jsonl`."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple

from raypod.plan import layout
from raypod.plan.cluster import Cluster, Host, Ssh
from raypod.plan.cluster_file import is_host, is_user
from raypod.plan.layout import LAUNCH
from raypod.runtime import ssh
from raypod.system.files import parse_json


class Process(NamedTuple):
    """A process of an instance."""

    instance: int
    host: str
    pid: int


def read_plan(folder: Path) -> Dict[str, Any]:
    """Return the content of `plan.json`; {} if there is none."""
    try:
        content = parse_json((folder / layout.PLAN).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def launch_hosts(folder: Path) -> List[str]:
    """Return the host of each instance of a launch; [] for a training."""
    try:
        names = parse_json((folder / LAUNCH).read_text())["hosts"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []


def cluster_in(plan: Mapping[str, Any]) -> Optional[Cluster]:
    """Return the hosts and the ssh settings of the cluster in a plan; None if the run used only this host.

    A run folder can come from anyone: its `ssh_proxy_command` is not executed, and none of its words is an option.
    """
    try:
        described = plan["cluster"]
        if described["is_local"]:
            return None
        hosts = tuple(Host(each["name"], each["address"]) for each in described["hosts"])
        settings = Ssh(**{**described["ssh"], "proxy_command": None})
        is_valid = all(is_host(host.address) for host in hosts) and (settings.user is None or is_user(settings.user))
        return Cluster(described["name"], hosts, ssh=settings) if is_valid else None
    except (KeyError, TypeError):  # a launch, or a file of another version
        return None


def has_proxy(plan: Mapping[str, Any]) -> bool:
    """Return whether a plan names an `ssh_proxy_command`."""
    cluster = plan.get("cluster")
    ssh_settings = cluster.get("ssh") if isinstance(cluster, dict) else None
    return isinstance(ssh_settings, dict) and bool(ssh_settings.get("proxy_command"))


def processes_in(records: Iterable[Mapping[str, Any]]) -> Tuple[List[Process], bool]:
    """Return the processes of all instances that the events name, without repetition, and whether all can be read."""
    found: Dict[Process, None] = {}
    is_complete = True
    for record in records:
        if record.get("event") in ("run_started", "repaired"):
            instances = record.get("instances", [])
            is_complete = is_complete and isinstance(instances, list)
            for each in instances if isinstance(instances, list) else ():
                try:
                    found[Process(int(each["instance"]), str(each["host"]), int(each["pid"]))] = None
                except (KeyError, TypeError, ValueError, OverflowError):  # written by another version
                    is_complete = False
    return list(found), is_complete


def elsewhere(folder: Path, cluster: Cluster, processes: Iterable[Process]) -> Tuple[Dict[str, List[int]], List[str]]:
    """Return the instances whose logs are on other hosts, by host, and the hosts that the cluster does not have.

    A log is on another host if the instance ran there, and the log in this folder has no output of its process: else
    the folder is on a shared disk.
    """
    hosts = {host.name: host for host in cluster.hosts}
    found: Dict[str, List[int]] = {}
    unknown: Dict[str, None] = {}
    for process in processes:
        host = hosts.get(process.host)
        if host is not None and ssh.is_local(host):
            continue
        if _has_output_of(folder / "logs" / f"instance-{process.instance}.log", process.pid):
            continue
        if host is None:
            unknown[process.host] = None
        elif process.instance not in found.setdefault(host.name, []):
            found[host.name].append(process.instance)
    return found, list(unknown)


def _has_output_of(log: Path, pid: int) -> bool:
    """Return whether a log has the line with which the output of a process begins."""
    try:
        with log.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(f", pid {pid}: started on".encode()) >= 0
    except (OSError, ValueError):  # there is none, or it is empty
        return False
