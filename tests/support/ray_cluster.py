"""A Ray cluster of several nodes on this machine, for tests."""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence

import psutil

SECOND_HOST, THIRD_HOST = "127.0.0.2", "127.0.0.3"
SIZES = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}


class RayCluster(NamedTuple):
    """`ray`, connected to `cluster`, whose nodes are in the order of their addresses; the driver is on the first."""

    ray: Any
    cluster: Any
    nodes: List[Any]


@contextlib.contextmanager
def ray_cluster(
    addresses: Sequence[str] = ("", SECOND_HOST), variables: Optional[Dict[str, str]] = None, **sizes: Any
) -> Iterator[RayCluster]:
    """Start a node for each address ("": this machine's own) and connect to them.

    `variables` are added to the environment of all processes; `sizes` are further arguments of `Cluster.add_node`.
    """
    environment = dict(os.environ)
    os.environ.update(variables or {})
    ray = importlib.import_module("ray")
    cluster = importlib.import_module("ray.cluster_utils").Cluster()
    sizes = {**SIZES, **sizes}
    try:
        nodes = [cluster.add_node(**sizes, **({"node_ip_address": each} if each else {})) for each in addresses]
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        # Without it Ray 2.10 can take the address of the last node for this process's own.
        ray.init(address=cluster.address, namespace="tests", _node_ip_address=nodes[0].node_ip_address, **quiet)
        yield RayCluster(ray, cluster, nodes)
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(environment)


def processes_of(node: Any) -> List[psutil.Process]:
    """Return all processes of a Ray node, its raylet first."""
    found: List[psutil.Process] = []
    for infos in node.all_processes.values():
        for info in infos:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(info.process.pid)
                found += [process, *process.children(recursive=True)]
    return found


def end_host(started: RayCluster, node: Any) -> None:
    """End all processes of a host at once, as if it had lost its power; Ray alone would keep its instances running."""
    for process in processes_of(node):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    started.cluster.remove_node(node, allow_graceful=False)
