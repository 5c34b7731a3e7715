"""The snapshots of a run: a process per host keeps them, and a repair continues from the newest one."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Dict, List, NamedTuple, Optional

from raypod.checkpoint.snapshots import Place, SnapshotMemory
from raypod.checkpoint.transfer import Server
from raypod.fleet.base import Fleet
from raypod.plan.plan import Plan

_ANSWER_S = 10.0  # for the process of a host that has answered just before


class Snapshot(NamedTuple):
    """The state after `update` updates in the memory of a host, and an instance that runs there."""

    update: int
    host: str
    place: Place
    root: int


class Snapshots:
    """The processes that keep the snapshots, by host. Without `--snapshot-every` there are none."""

    def __init__(self, plan: Plan, fleet: Fleet) -> None:
        self._is_on = plan.config.run.snapshot_every > 0
        self._start_timeout_s, self._fleet = plan.config.run.start_timeout_s, fleet
        self._servers: Dict[str, Server] = {}
        self._places: Dict[str, Place] = {}

    def begin(self) -> None:
        """Start a process on each host of the run that has none, and tell the instances where they write.

        A host on which none can be started has no snapshots.
        """
        if not self._is_on:
            return
        hosts = self._fleet.hosts()
        for host in dict.fromkeys(hosts):
            if host not in self._servers:
                with contextlib.suppress(OSError):
                    self._servers[host] = self._fleet.serve_on(host, SnapshotMemory)
        new = [host for host in self._servers if host not in self._places]
        self._places.update(self._ask("place", new, self._start_timeout_s))
        # The first instance of each host writes.
        places = [self._places.get(host) if hosts.index(host) == index else None for index, host in enumerate(hosts)]
        self._fleet.call("keep_snapshots", places)

    def newest(self, reported: int) -> Optional[Snapshot]:
        """Return the newest complete snapshot on a host of the run; None if there is none.

        A later one than of `reported` updates, whose reports are not complete, counts only if there is no other: these
        updates would have no metrics.
        """
        hosts = self._fleet.hosts()
        on_hosts = self._ask("updates", [host for host in dict.fromkeys(hosts) if host in self._places], _ANSWER_S)
        found = [
            Snapshot(update, host, self._places[host], hosts.index(host))
            for host, updates in on_hosts.items()
            for update in updates
        ]
        known = [each for each in found if each.update <= reported]
        if known:
            return max(known, key=lambda each: each.update)
        return min(found, key=lambda each: each.update, default=None)

    def close(self) -> None:
        """End the processes, with the snapshots."""
        for host in list(self._servers):
            self._end(host)

    def _ask(self, method: str, hosts: List[str], timeout_s: float) -> Dict[str, Any]:
        """Return the results of the processes of these hosts; end those that do not answer."""
        handles = {host: self._servers[host].request(method) for host in hosts}
        deadline, results = time.monotonic() + timeout_s, {}
        for host, handle in handles.items():
            try:
                results[host] = self._servers[host].result(handle, max(0.0, deadline - time.monotonic()))
            except OSError:
                self._end(host)
        return results

    def _end(self, host: str) -> None:
        self._places.pop(host, None)
        self._servers.pop(host).close()
