"""Objects in Ray actors on the coordinator's host, whose methods instances call: see `Fleet.serve`."""

from __future__ import annotations

import importlib
from typing import Any, Callable

from raypod.fleet.ray_reservation import node_affinity
from raypod.fleet.ray_session import death_reason


class RayServer:
    """A `checkpoint.transfer.Server`. It can be sent to other processes of the Ray session."""

    def __init__(self, ray: Any, kind: Callable[..., Any], *arguments: Any) -> None:
        """Start an actor on the node of this process, without waiting for it."""
        node = {"NodeID": ray.get_runtime_context().get_node_id()}
        # If it dies, the checkpoint that it was writing fails, and the next one succeeds.
        options = {**node_affinity(node), "max_restarts": -1}
        self._actor = ray.remote(kind).options(**options).remote(*arguments)

    def request(self, method: str, *arguments: Any) -> Any:
        """See `Server.request`."""
        return getattr(self._actor, method).remote(*arguments)

    def result(self, handle: Any, timeout_s: float) -> Any:
        """See `Server.result`."""
        ray = importlib.import_module("ray")
        try:
            return ray.get(handle, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError("the coordinator's host does not respond") from None
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise ConnectionError(f"no connection to the coordinator's host: {death_reason(str(error))}") from error

    def close(self) -> None:
        """See `Server.close`."""
        importlib.import_module("ray").kill(self._actor)
