"""`raypod cluster-file`: write the cluster file of the Ray cluster that runs on this host.

Under Kubernetes and Slurm the addresses of the hosts are known only when their Ray nodes have started.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence

import yaml

from raypod.errors import ClusterError, ConfigError
from raypod.runtime.workers.ray_nodes import alive_nodes
from raypod.runtime.workers.ray_session import running_session
from raypod.system.command_line import FlagParser, counted, show
from raypod.system.files import replace_file

_POLL_S = 0.5
_LOG_INTERVAL_S = 10.0
_HEAD = "node:__internal_head__"  # the resource of Ray's head node


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns 0.

    Raises:
        ClusterError: no Ray cluster runs on this host, or too few nodes have joined it in time.
        ConfigError: the flags are wrong, or the file cannot be written.
    """
    _check(args)
    with running_session() as ray:
        nodes = _nodes(ray, args.hosts, args.wait_s)
    content = yaml.safe_dump(cluster_of_nodes(nodes, args.name, args.instances_per_host), sort_keys=False)
    try:
        replace_file(Path(args.output), content.encode())
    except OSError as error:
        raise ConfigError(f"cannot write {args.output}: {error.strerror}") from None
    addresses = ", ".join(node["NodeManagerAddress"] for node in nodes)
    show(f"{args.output}: {counted(len(nodes), 'host')}: {addresses}")
    return 0


def cluster_of_nodes(nodes: Sequence[Dict[str, Any]], name: str, instances_per_host: int) -> Dict[str, Any]:
    """Return the content of a cluster file with these Ray nodes, the head first.

    `ray up` needs further settings; raypod needs no others on a cluster that runs.
    """
    head, *workers = [node["NodeManagerAddress"] for node in nodes]
    settings: Dict[str, Any] = {"instances_per_host": instances_per_host, "python": sys.executable}
    ipus = int(min(node["Resources"].get("IPU", 0) for node in nodes))
    return {
        "cluster_name": name,
        "provider": {"type": "local", "head_ip": head, "worker_ips": workers},
        "min_workers": len(workers),
        "max_workers": len(workers),
        "auth": {"ssh_user": os.environ.get("USER") or str(os.getuid())},  # `ray up` needs one
        "metadata": {"raypod": {**({"ipus_per_host": ipus} if ipus else {}), **settings}},
    }


def parser() -> FlagParser:
    """Return the parser of the command."""
    description = "Write the cluster file of the running Ray cluster."
    parser = FlagParser(run, prog="raypod cluster-file", description=description)
    parser.add_argument("--hosts", type=int, required=True, metavar="N", help="number of Ray nodes to wait for")
    parser.add_argument("--output", required=True, metavar="FILE", help="the file to write")
    parser.add_argument("--wait-s", type=float, default=300.0, metavar="S", help="longest wait for the nodes [300]")
    parser.add_argument("--name", default="pod", help="name of the cluster in messages [pod]")
    parser.add_argument("--instances-per-host", type=int, default=1, metavar="N", help="host processes per host [1]")
    return parser


def _check(args: argparse.Namespace) -> None:
    for flag, value in (("--hosts", args.hosts), ("--instances-per-host", args.instances_per_host)):
        if value < 1:
            raise ConfigError(f"{flag} {value} must be at least 1")
    if not 0 <= args.wait_s <= 1e6:
        raise ConfigError(f"--wait-s {args.wait_s:g} must be between 0 and 1e6")


def _nodes(ray: Any, hosts: int, within_s: float) -> List[Dict[str, Any]]:
    """Return the first `hosts` live nodes, the head first, the others by address."""
    deadline, logged_s = time.monotonic() + within_s, time.monotonic()
    while True:
        alive = alive_nodes(ray)
        if len(alive) >= hosts:
            alive.sort(key=lambda node: (_HEAD not in node["Resources"], _sort_key(node["NodeManagerAddress"])))
            return alive[:hosts]
        found = ", ".join(node["NodeManagerAddress"] for node in alive)
        if time.monotonic() >= deadline:
            raise ClusterError(f"{len(alive)} of {hosts} Ray nodes have joined within {within_s:g} s: {found}")
        if time.monotonic() - logged_s > _LOG_INTERVAL_S:
            logged_s = time.monotonic()
            show(f"raypod: {len(alive)} of {hosts} Ray nodes have joined: {found}", sys.stderr)
        time.sleep(_POLL_S)


def _sort_key(address: str) -> List[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in address.split(".")]
