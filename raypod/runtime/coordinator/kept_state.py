"""Choose and save the newest state that any instance holds, in the run folder or, if it is full, on another disk."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Set

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
from raypod.events import CheckpointFailed, Event
from raypod.plan.plan import Plan
from raypod.runs.metrics import MetricsAggregator
from raypod.runtime.coordinator.checkpoint_schedule import CheckpointSchedule
from raypod.runtime.coordinator.snapshots import Snapshot, Snapshots
from raypod.runtime.workers.fleet import Fleet, FleetBroken
from raypod.training.checkpoint import storage

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
        elsewhere: Optional[Elsewhere] = None,
    ) -> None:
        self._plan, self._fleet, self.metrics, self.schedule = plan, fleet, metrics, schedule
        self.snapshots = snapshots
        self._elsewhere = elsewhere or Elsewhere(plan)
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
            yield from self._go_to(snapshot.update)
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
        yield from self._go_to(positions[root])
        yield from self.schedule.save_on(self._fleet, root, positions[root], folder)

    def _go_to(self, update: int) -> Iterator[Event]:
        updates = self.metrics.rollback_to(update, time.monotonic())
        yield from self.metrics.take_calls()
        yield from updates


def newest(positions: Dict[int, int]) -> Optional[int]:
    """Return the survivor with the newest state, the lowest index if there are several; None if none has a state."""
    trained = {index: update for index, update in positions.items() if update >= 0}
    return min(trained, key=lambda index: (-trained[index], index)) if trained else None


# A folder on another disk of this host, for the newest state of a run whose run folder cannot take it any more.
#
# It has what a run folder has, and is passed on to the places that keep the run besides its folder: `api/rescue.py`.


class Elsewhere:
    """The other folder of one run; it is created when it is needed.

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
