"""The newest state that any instance holds: saved in the run folder or on another disk, and snapshots on the hosts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from raypod.errors import (
    CheckpointDamaged,
    CheckpointNotSaved,
    FolderLost,
    LeaseLost,
    LossNotFinite,
    RaypodError,
    WeightsDiffer,
    summarize_exception,
)
from raypod.events import CheckpointFailed, Event, SaveReport
from raypod.plan.plan import Plan
from raypod.runs.metrics import MetricsAggregator
from raypod.runtime.coordinator.checkpoint_schedule import CheckpointSchedule, write_from_host
from raypod.runtime.workers.fleet import Fleet, FleetBroken
from raypod.training.checkpoint import storage
from raypod.training.checkpoint.format import Manifest
from raypod.training.checkpoint.snapshots import Place, SnapshotMemory
from raypod.training.checkpoint.transfer import Server

# After these errors there is no state to save, no place for it in the run folder, or that belongs to another run.
_WITHOUT_STATE = (CheckpointDamaged, CheckpointNotSaved, LeaseLost, LossNotFinite, WeightsDiffer)
_OTHER_DISKS = ("/var/tmp", "/dev/shm")  # besides the temporary folder, if that is on the disk of the run folder


class KeptState:
    """The state that the instances of a run hold.

    Attributes:
        metrics, schedule, snapshots: of the run.
        lost: the instances that hold none: they were lost, or have replaced others and are not seeded yet.
    """

    def __init__(
        self,
        plan: Plan,
        fleet: Fleet,
        metrics: MetricsAggregator,
        schedule: CheckpointSchedule,
        snapshots: Snapshots,
        elsewhere: Elsewhere,
    ) -> None:
        self._plan, self._fleet, self.metrics, self.schedule = plan, fleet, metrics, schedule
        self.snapshots, self._elsewhere = snapshots, elsewhere
        self.lost: Set[int] = set()

    def lose_all(self) -> None:
        """Note that no instance holds the state, however many there are."""
        self.lost = set(range(self._plan.geometry.total_replicas))

    def newest_snapshot(self, update: int) -> Optional[Snapshot]:
        """Return the snapshot from which the run continues; None if one is not newer than the state after `update`.

        That is the newest state of the instances, -1 for none. Nor is one used that is older than a checkpoint.
        """
        if update >= self.metrics.position:
            return None
        found, last = self.snapshots.newest(self.metrics.position), self.schedule.last
        is_newest = found is not None and found.update > update and (last is None or found.update >= last.update)
        return found if is_newest else None

    def save(self, folder: Optional[Path] = None) -> Iterator[Event]:
        """Make an instance with the newest state write it as a checkpoint; repeat if that loses further instances.

        If none has it, the newest snapshot is written, but only into the run folder.

        All instances leave the process group: they must be replaced or end afterwards. `folder` is another one than the
        run folder.

        Raises:
            CheckpointNotSaved: it could not be written, and there is no earlier one.
        """
        yield from self._save_held(folder)
        if folder is not None:
            return
        snapshot = self.newest_snapshot(self.schedule.last.update if self.schedule.last is not None else -1)
        if snapshot is not None:
            yield from self.go_to(snapshot.update)
            yield from self.schedule.save_by(functools.partial(self.snapshots.save, snapshot), snapshot.update)

    def _save_held(self, folder: Optional[Path]) -> Iterator[Event]:
        while True:
            holders = [index for index in range(len(self._fleet.hosts())) if index not in self.lost]
            if not holders:
                return
            try:
                yield from self._save_state_of(holders, folder)
                return
            except FleetBroken as broken:
                yield from broken.losses
                further = {loss.instance for loss in broken.losses} - self.lost
                if not further:  # the newest checkpoint counts
                    return
                self.lost = self.lost | further

    def try_to_save(self, is_elsewhere: bool = False) -> Iterator[Event]:
        """Save the state; if that fails, the event says why."""
        try:
            yield from self.save(self._elsewhere.folder() if is_elsewhere else None)
        except Exception as error:  # noqa: BLE001 - also Ray's; what must be told first is why the state is saved
            update, last = self.metrics.position, self.schedule.last
            path = storage.checkpoint_path(storage.checkpoints_folder(self._plan.run_dir), update)
            cause = error.cause if isinstance(error, CheckpointNotSaved) else summarize_exception(error)
            yield CheckpointFailed(update, str(path), cause, last.path if last is not None else "")

    def save_at_end(self, error: RaypodError) -> Iterator[Event]:
        """Save the state if `error` ends the run after further updates."""
        is_elsewhere = self._elsewhere.is_for(error)
        if self.metrics.last is not None and (is_elsewhere or not isinstance(error, _WITHOUT_STATE)):
            yield from self.try_to_save(is_elsewhere)

    def _save_state_of(self, holders: List[int], folder: Optional[Path]) -> Iterator[Event]:
        positions = self._fleet.release(holders)
        root = newest(positions)
        if root is None:
            return
        missing = self.metrics.missing_reports(positions[root])
        for reports in self._fleet.call_on(holders, "lost_reports", missing).values() if missing else ():
            self.metrics.add_lost_reports(reports or ())
        if 0 in holders and folder is None:
            yield from map(self.schedule.record, self._fleet.call_on((0,), "finish_saves")[0])
        yield from self.go_to(positions[root])
        yield from self.schedule.save_on(self._fleet, root, positions[root], folder)

    def go_to(self, update: int) -> Iterator[Event]:
        """Continue the metrics after `update`; yield the events of the calls and updates before it."""
        updates = self.metrics.rollback_to(update, time.monotonic())
        yield from self.metrics.take_calls()
        yield from updates


def newest(positions: Dict[int, int]) -> Optional[int]:
    """Return the survivor with the newest state, the lowest index if there are several; None if none has a state."""
    trained = {index: update for index, update in positions.items() if update >= 0}
    return min(trained, key=lambda index: (-trained[index], index)) if trained else None


class Elsewhere:
    """A folder on another disk of this host, for the newest state of a run whose run folder cannot take it any more.

    It is created when it is needed, has what a run folder has, and is passed on to the places that keep the run besides
    its folder: `api/training.py`.

    Attributes:
        is_wanted: the run has another place, `--storage-path` or `--checkpoint-copies`.
        way_on: where the state is and how the run continues from there, for a message; "" if it is nowhere.
    """

    def __init__(self, plan: Plan) -> None:
        run = plan.config.run
        self.is_wanted, self.way_on = run.storage_path is not None or run.checkpoint_copies > 1, ""
        self._name, self._folder = Path(plan.run_dir).resolve().name, None  # type: str, Optional[Path]
        self._device = _device(Path(plan.run_dir))

    def is_for(self, error: RaypodError) -> bool:
        """Return whether a run that ends by an error has a state that only its run folder does not take."""
        return self.is_wanted and isinstance(error, (CheckpointNotSaved, FolderLost))

    def folder(self) -> Path:
        """Return the folder, with the name of the run folder, which a mirror needs. OSError if it cannot be created."""
        if self._folder is None:
            folder = Path(tempfile.mkdtemp(prefix="raypod-state-", dir=self._parent()), self._name)
            folder.mkdir()
            self._folder = folder
        return self._folder

    def holds(self, path: str) -> bool:
        """Return whether a checkpoint is in the folder."""
        return self._folder is not None and self._folder in Path(path).parents

    def remove(self) -> None:
        """Remove the folder."""
        if self._folder is not None:
            shutil.rmtree(str(self._folder.parent), ignore_errors=True)

    def named(self, error: RaypodError) -> RaypodError:
        """Return the error with the way on, if there is one."""
        if self.way_on and isinstance(error, CheckpointNotSaved):
            return CheckpointNotSaved(error.path, error.cause, self.way_on)
        if self.way_on and isinstance(error, FolderLost):
            return FolderLost(error.folder, self.way_on)
        return error

    def _parent(self) -> str:
        candidates = (tempfile.gettempdir(), *_OTHER_DISKS)
        others = (each for each in candidates if _device(Path(each)) not in (None, self._device))
        return next((each for each in others if os.access(each, os.W_OK)), candidates[0])


def _device(path: Path) -> Optional[int]:
    with contextlib.suppress(OSError):
        return path.stat().st_dev
    return None


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
