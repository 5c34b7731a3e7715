"""Standbys: processes that have imported torch and the SDK and loaded the data, and wait to replace lost instances.

They wait on the hosts of the plan, whose resources are reserved. A replacement on another host starts a new process.
"""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from raypod.errors import summarize_exception
from raypod.plan.plan import Plan
from raypod.runtime.workers.death_cause import death_reason
from raypod.runtime.workers.ray_reservation import node_affinity

_WITHIN_S = 5.0  # for a standby to be prepared, and to begin; then a new process starts
_HOW = "continued by a standby"

StartActor = Callable[[Optional[int], Dict[str, Any], Dict[str, Any]], Any]


class Standbys:
    """The standbys of a plan: `run.standby` on each of its hosts."""

    def __init__(
        self, ray: Any, plan: Plan, start: StartActor, kill: Callable[[Any], None], log: Callable[[str], None]
    ) -> None:
        """
        Args:
            start: starts an actor with this index, None for a standby, on a Ray node, with these options.
            kill: ends an actor that may not respond.
            log: receives a line for the user about a standby that cannot be used.
        """
        self._ray, self._plan, self._start, self._kill, self._log = ray, plan, start, kill, log
        self._waiting: Dict[str, List[Tuple[Any, Any]]] = {}  # by node: actors, and the results of their preparation

    def fill(self, nodes: Sequence[Dict[str, Any]]) -> None:
        """Start those that are missing on the nodes of the plan's hosts, in host order. Does not wait for them."""
        for host_index, node in enumerate(nodes):
            waiting = self._waiting.setdefault(node["NodeID"], [])
            while len(waiting) < self._plan.config.run.standby:
                actor = self._start(None, node, {**node_affinity(node), "max_restarts": 0})
                waiting.append((actor, actor.prepare.remote(host_index)))

    def take(self, index: int, node: Dict[str, Any]) -> Optional[Any]:
        """Return a standby on a node that has begun as instance `index`; None if there is none."""
        waiting = self._waiting.get(node["NodeID"], [])
        deadline_s = time.monotonic() + _WITHIN_S
        while waiting:
            preparations = [preparation for _, preparation in waiting]
            # One that is being prepared is ahead of a new process.
            ready, _ = self._ray.wait(preparations, timeout=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                self._log(f"{self._about(index)}: not prepared within {_WITHIN_S:g} s")
                return None
            actor, preparation = waiting.pop(preparations.index(ready[0]))
            try:
                self._ray.get(preparation)
                self._ray.get(actor.begin.remote(index, _HOW), timeout=_WITHIN_S)
                return actor
            except self._ray.exceptions.RayError as error:
                self._kill(actor)
                self._log(f"{self._about(index)}: {self._reason(error)}")
        return None

    def _about(self, index: int) -> str:
        return f"a standby on {self._plan.placement.instances[index].host} cannot be used for instance {index}"

    def _reason(self, error: Exception) -> str:
        errors = self._ray.exceptions
        if isinstance(error, errors.GetTimeoutError):
            return f"it did not respond within {_WITHIN_S:g} s"
        return summarize_exception(error.cause) if isinstance(error, errors.RayTaskError) else death_reason(str(error))

    def close(self) -> None:
        """End all standbys."""
        for waiting in self._waiting.values():
            for actor, _ in waiting:
                self._kill(actor)
        self._waiting = {}
