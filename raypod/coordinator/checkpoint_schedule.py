"""When a checkpoint is due, and what becomes of it: the coordinator's side of the writing in instance 0."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from pathlib import Path
from typing import Iterator, Optional

from raypod.checkpoint.format import Checkpoint, folder_of, found_in, read_manifest, replace_manifest
from raypod.checkpoint.resume import FINGERPRINT, manifest_of
from raypod.errors import CheckpointDamaged, CheckpointNotSaved, LossNotFinite
from raypod.events import (
    CheckpointBegun,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    InstanceStarted,
    SaveReport,
    UpdateDone,
)
from raypod.fleet.base import Fleet
from raypod.plan.config import parse_interval
from raypod.plan.plan import Plan
from raypod.record.ledger import last_generation


class Saving:
    """The checkpoints of one run."""

    def __init__(self, plan: Plan, started: InstanceStarted, resumed: Optional[Checkpoint]) -> None:
        """`started`: instance 0, which writes them."""
        self._plan, self._started = plan, started
        self._interval = parse_interval(plan.config.run.checkpoint_every)
        self._begun_s = time.monotonic()
        self._begun_update: Optional[int] = None
        self.last: Optional[CheckpointSaved] = None
        self.generation = next_generation(plan, resumed)
        self.go_back_to(resumed)

    def is_late(self) -> bool:
        """Whether a checkpoint that is due by the clock has to be taken after the calls under way."""
        return time.monotonic() - self._begun_s >= self._interval.seconds

    def is_due(self, update: int) -> bool:
        """Whether a checkpoint has to be taken now, after `update` updates."""
        every = self._plan.save_every_updates
        return (
            self.is_late() or update == self._plan.total_updates or (every > 0 and update > 0 and update % every == 0)
        )

    def begin(self, fleet: Fleet, update: int, test_accuracy: Optional[float] = None) -> Iterator[Event]:
        """Let instance 0 copy the state and write it, beside what comes next; `test_accuracy` in percent, if known."""
        if update == self._begun_update:
            return
        manifest = manifest_of(self._plan, update, self.generation)
        settings = {**manifest.settings, FINGERPRINT: self._started.data_fingerprint}
        versions = dict(self._started.versions)
        manifest = dataclasses.replace(manifest, settings=settings, versions=versions, test_accuracy=test_accuracy)
        yield CheckpointBegun(update)
        fleet.call("save", manifest)
        self._begun_update, self._begun_s = update, time.monotonic()

    def add_accuracy(self, update: int, test_accuracy: float) -> None:
        """The checkpoint after `update` updates was evaluated (percent), if it was written before that."""
        if self.last is not None and self.last.update == update:
            # A full disk: the run has it in its evaluations.
            with contextlib.suppress(OSError, CheckpointDamaged):
                checkpoint = read_manifest(Path(self.last.path))
                replace_manifest(checkpoint, dataclasses.replace(checkpoint.manifest, test_accuracy=test_accuracy))

    def go_back_to(self, saved: Optional[Checkpoint]) -> None:
        """The run goes on from a checkpoint, None for the beginning: whatever comes after it is due, again or not."""
        self._begun_update, self.last = None, None
        if saved is not None and saved.path.parent.resolve() == folder_of(self._plan.run_dir).resolve():
            # Nothing has to be written where the run goes on from.
            self._begun_update = saved.update
            self.last = CheckpointSaved(saved.update, str(saved.path), saved.manifest.weights_sha256)

    def forget_unfinished(self) -> None:
        """Whoever was writing is lost, and what was not finished with it: it is due again."""
        self._begun_update = self.last.update if self.last is not None else None

    def take(self, report: SaveReport) -> Event:
        """What became of a checkpoint.

        Raises:
            CheckpointNotSaved: it could not be written, and there is no other.
        """
        if report.error is None:
            self.last = CheckpointSaved(report.update, report.path, report.weights_sha256)
            return self.last
        if self.last is None:
            raise CheckpointNotSaved(report.path, report.error, "there is no other, so the run ends here")
        return CheckpointFailed(report.update, report.path, report.error, self.last.path)

    def check_finite(self, update: UpdateDone) -> None:
        """LossNotFinite unless the loss of an update is a number, or the run is to go on without."""
        if math.isfinite(update.loss) or self._plan.config.run.on_nonfinite == "continue":
            return
        way_out = "there is no checkpoint from before: start again with a lower --learning-rate"
        if self.last is not None:
            way_out = f"{self.last.path} is from before: --resume it with a lower --learning-rate"
        raise LossNotFinite(update.loss, update.update - 1, update.update, f"{way_out}, or --on-nonfinite continue")

    def finish(self, fleet: Fleet) -> Iterator[Event]:
        """Wait for the checkpoint under way.

        Raises:
            CheckpointNotSaved: the last one could not be written.
        """
        for report in fleet.call("finish_saves")[0]:
            if report.error is not None and report.update == self._begun_update and self.last is not None:
                way_out = f"go on from {self.last.path} with --resume {self._plan.run_dir}"
                raise CheckpointNotSaved(report.path, report.error, way_out)
            yield self.take(report)


def next_generation(plan: Plan, resumed: Optional[Checkpoint]) -> int:
    """1 for a run that starts, and more than whatever its folder holds for one that goes on."""
    found, _ = found_in(folder_of(Path(plan.run_dir)))
    before = [last_generation(plan.run_dir), *(each.manifest.generation for each in found)]
    return 1 + max(before + ([resumed.manifest.generation] if resumed else []))
