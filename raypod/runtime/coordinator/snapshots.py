"""The snapshots of a run: a process per host keeps them, and a repair continues from the newest one."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from raypod.events import SaveReport
from raypod.plan.plan import Plan
from raypod.runtime.coordinator.checkpoint_schedule import write_from_host
from raypod.runtime.workers.fleet import Fleet
from raypod.training.checkpoint import storage
from raypod.training.checkpoint.format import Manifest
from raypod.training.checkpoint.snapshots import Place, SnapshotMemory
from raypod.training.checkpoint.transfer import Server

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
        self._plan, self._fleet = plan, fleet
        self._servers: Dict[str, Server] = {}
        self._places: Dict[str, Place] = {}

    def begin(self) -> None:
        """Start a process on each host of the run that has none any more, and tell the instances where they write.

        A host on which none can be started has no snapshots.
        """
        if not self._plan.config.run.snapshot_every:
            return
        hosts = self._fleet.hosts()
        self._ask("place", [host for host in self._servers if host in hosts], _ANSWER_S)
        new = [host for host in dict.fromkeys(hosts) if host not in self._servers]
        for host in new:
            with contextlib.suppress(OSError):
                self._servers[host] = self._fleet.serve_on(host, SnapshotMemory)
        started = [host for host in new if host in self._servers]
        self._places.update(self._ask("place", started, self._plan.config.run.start_timeout_s))
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

    def save(self, snapshot: Snapshot, manifest: Manifest) -> Tuple[SaveReport, ...]:
        """Write a snapshot as a checkpoint into the run folder of this host."""
        run_dir, timeout_s = str(Path(self._plan.run_dir).absolute()), self._plan.config.run.save_timeout_s
        plan, server = dataclasses.replace(self._plan, run_dir=run_dir), self._servers[snapshot.host]

        def ask(method: str, *arguments: Any) -> Any:
            return server.result(server.request(method, *arguments), timeout_s)

        try:
            return write_from_host(
                *(self._fleet, run_dir),
                has_file=lambda path: bool(ask("has_file", path)),
                write=lambda receiver: tuple(ask("save", plan, manifest, receiver)),
            )
        except OSError as error:
            path = storage.checkpoint_path(storage.checkpoints_folder(run_dir), manifest.update)
            return (SaveReport(manifest.update, str(path), "", error.strerror or str(error)),)

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
