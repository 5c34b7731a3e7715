"""Ending the process of an instance for certain: through Ray, and by its pid on its own host.

Ray lets a process end itself first, and Ray 2.10 does nothing else: a frozen one would stay, and keep its place.
"""

from __future__ import annotations

import os
import signal
from typing import Any, Dict, List, Tuple

from raypod.fleet.ray_reservation import affinity_options
from raypod.record.run_state import ticks_of

_ENDS_WITHIN_S = 10.0  # how long `close` waits for the hosts; one that is lost never answers


class Killer:
    """Of the actors of one fleet."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._end_process = ray.remote(end_process)
        self._processes: Dict[Any, Tuple[Dict[str, Any], Any]] = {}  # of each actor: its Ray node, what identifies it
        self._under_way: List[Any] = []

    def know(self, actor: Any, node: Dict[str, Any]) -> None:
        """Ask an actor that was just started which process it is: once it is frozen, it does not say."""
        self._processes[actor] = (node, actor.identity.remote())

    def kill(self, actor: Any) -> None:
        """End an actor that may still answer, or is dead already."""
        self._processes.pop(actor, None)
        self._ray.kill(actor)

    def kill_frozen(self, actor: Any) -> None:
        """End an actor that may not even listen. Does not wait for it, and does nothing to a host that is gone."""
        node, identity = self._processes.pop(actor, ({}, None))
        self._ray.kill(actor)
        if identity is None or not self._ray.wait([identity], timeout=0)[0]:
            return
        try:
            pid, started_ticks = self._ray.get(identity)
        except self._ray.exceptions.RayError:
            return  # it did not come to life
        options = {**affinity_options(node, 0), "max_retries": 0}
        del options["max_restarts"]
        self._under_way.append(self._end_process.options(**options).remote(pid, started_ticks))

    def close(self) -> None:
        """Wait until all have ended, within a bound."""
        if self._under_way:
            _, late = self._ray.wait(self._under_way, num_returns=len(self._under_way), timeout=_ENDS_WITHIN_S)
            for ref in late:
                self._ray.cancel(ref, force=True)
        self._under_way = []


def end_process(pid: int, started_ticks: int) -> None:
    """End a process of this host, unless the pid is another one's meanwhile (`record/run_state.py`)."""
    if ticks_of(pid) == started_ticks:
        os.kill(pid, signal.SIGKILL)
