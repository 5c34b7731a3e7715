"""Objects in Ray actors on a host, whose methods other processes call: see `Fleet.serve` and `Fleet.serve_on`."""

from __future__ import annotations

import importlib
from typing import Any, Callable

from raypod.plan.cluster import Cluster
from raypod.runtime.workers.ray_nodes import nodes_of
from raypod.runtime.workers.ray_reservation import node_affinity
from raypod.runtime.workers.ray_wait import death_reason


class RayServer:
    """A `checkpoint.transfer.Server`. It can be sent to other processes of the Ray session."""

    def __init__(self, actor: Any, host: str) -> None:
        """`host` names the host of the actor in errors."""
        self._actor, self._host = actor, host

    def request(self, method: str, *arguments: Any) -> Any:
        return getattr(self._actor, method).remote(*arguments)

    def result(self, handle: Any, timeout_s: float) -> Any:
        ray = importlib.import_module("ray")
        try:
            return ray.get(handle, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"{self._host} does not respond") from None
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise ConnectionError(f"no connection to {self._host}: {death_reason(str(error))}") from error

    def close(self) -> None:
        importlib.import_module("ray").kill(self._actor)


def serve_here(ray: Any, kind: Callable[..., Any], *arguments: Any) -> RayServer:
    """Start an actor on the node of this process, without waiting for it."""
    node = {"NodeID": ray.get_runtime_context().get_node_id()}
    # If it dies, the checkpoint that it was writing fails, and the next one succeeds.
    options = {**node_affinity(node), "max_restarts": -1}
    return RayServer(ray.remote(kind).options(**options).remote(*arguments), "the coordinator's host")


def serve_on(ray: Any, cluster: Cluster, host: str, kind: Callable[..., Any], *arguments: Any) -> RayServer:
    """Start an actor on the host of a cluster with the name `host`, without waiting for it.

    Raises:
        ConnectionError: the host has no live node.
    """
    (node,) = nodes_of(ray, [each for each in cluster.hosts if each.name == host])
    if not node:
        raise ConnectionError(f"no Ray node is alive on host {host}")
    options = {**node_affinity(node), "max_restarts": 0}
    return RayServer(ray.remote(kind).options(**options).remote(*arguments), f"host {host}")
