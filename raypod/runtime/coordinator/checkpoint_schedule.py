"""Decide when a checkpoint is due, request it from instance 0, and record which checkpoints were written."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Tuple

from raypod.errors import CheckpointDamaged, CheckpointNotSaved, LossNotFinite
from raypod.events import (
    CheckpointBegun,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    InstanceStarted,
    Resized,
    SaveReport,
    UpdateDone,
)
from raypod.plan.plan import Plan
from raypod.plan.values import parse_interval, parse_unsaved
from raypod.runs.ledger import last_generation
from raypod.runs.metrics import MetricsAggregator
from raypod.runtime.workers.fleet import Fleet, FleetBroken
from raypod.training.checkpoint import storage
from raypod.training.checkpoint.format import Checkpoint, Manifest
from raypod.training.checkpoint.resume import manifest_of
from raypod.training.checkpoint.transfer import CheckpointFiles, CheckpointReceiver, Server


class CheckpointSchedule:
    """The checkpoints of one run.

    Attributes:
        last: the newest one that was written, None before the first.
        failed: the newest one that its disk did not take, None once a later one is written.
        generation, resizes: of the run, for the manifests.
    """

    def __init__(
        self, plan: Plan, started: InstanceStarted, resumed: Optional[Checkpoint], metrics: MetricsAggregator
    ) -> None:
        """`started` is the report of instance 0, which writes the checkpoints."""
        self._plan, self._started, self._metrics = plan, started, metrics
        self._interval = parse_interval(plan.config.run.checkpoint_every)
        self._max_unsaved = parse_unsaved(plan.config.run.max_unsaved)
        self._failures, self._failing_since_s = 0, 0.0  # of saves since the newest checkpoint
        self.failed: Optional[SaveReport] = None
        self._begun_s = 0.0  # when a checkpoint of the current state was last begun or found to exist
        self._begun_update: Optional[int] = None
        self._receiver: Optional[Server] = None  # of the checkpoints of instance 0, if it shares no disk with this host
        self._evaluated: Tuple[int, Dict[str, float]] = (-1, {})  # the update and its test metrics
        self.last: Optional[CheckpointSaved] = None
        self.resizes: List[Dict[str, int]] = list(resumed.manifest.resizes) if resumed else []
        self._first_replicas = 0  # before the first change, if it was in this process
        self.generation = next_generation(plan, resumed)
        self._continue_from(resumed, self.generation)

    def interval_elapsed(self) -> bool:
        """Return whether the configured time has passed since the previous checkpoint."""
        return time.monotonic() - self._begun_s >= self._interval.seconds

    def is_due(self, update: int) -> bool:
        """Return whether a checkpoint is due after `update` updates."""
        if self.interval_elapsed() or update == self._plan.total_updates:
            return True
        every = self._plan.save_every_updates
        return every > 0 and update > 0 and update % every == 0

    def must_wait(self) -> bool:
        """Return whether the training must stop until a checkpoint is written: see `--max-unsaved`.

        So it must if there is no earlier checkpoint.
        """
        if self.failed is None:
            return False
        if self._max_unsaved.unit == "checkpoint" and self._failures >= self._max_unsaved.count:
            return True
        return self.last is None or time.monotonic() - self._failing_since_s >= self._max_unsaved.seconds

    def begin(self, fleet: Fleet, update: int, tested: Optional[Dict[str, float]] = None) -> Iterator[Event]:
        """Make instance 0 copy its state and write it in the background, unless that was begun at this update.

        `tested` holds the test metrics of this update, if they are known.
        """
        if update == self._begun_update:
            self._begun_s = time.monotonic()
            return
        yield CheckpointBegun(update)
        fleet.call("save", self._manifest(update, tested))
        self._begun_update, self._begun_s = update, time.monotonic()

    def save_on(self, fleet: Fleet, root: int, update: int, folder: Optional[Path] = None) -> Iterator[Event]:
        """Write the state after `update` updates that instance `root` has kept, unless there is that checkpoint.

        `folder` is another one than the run folder.
        """
        if folder is not None:
            report = write_kept_into(fleet, root, self._manifest(update), folder)[-1]
            yield self.record(report if report.error is None else dataclasses.replace(report, can_pass=True))
        else:
            yield from self.save_by(lambda manifest: write_kept(fleet, root, manifest, self._plan.run_dir), update)

    def save_by(self, write: Callable[[Manifest], Tuple[SaveReport, ...]], update: int) -> Iterator[Event]:
        """Write the state after `update` updates with `write`, unless there is that checkpoint."""
        if self.last is None or self.last.update != update:
            yield CheckpointBegun(update)
            yield from map(self.record, write(self._manifest(update)))

    def _manifest(self, update: int, tested: Optional[Dict[str, float]] = None) -> Manifest:
        versions = dict(self._started.versions)
        fingerprint, sums = self._started.data_fingerprint, self._metrics.epoch_sums()
        return manifest_of(self._plan, update, self.generation, fingerprint, versions, tested, self.resizes, sums)

    def add_evaluation(self, update: int, tested: Dict[str, float]) -> None:
        """Add the test metrics to the checkpoint of `update`, if it was begun before the evaluation."""
        self._evaluated = (update, tested)
        self._add_evaluation()

    def _add_evaluation(self) -> None:
        update, tested = self._evaluated
        if self.last is not None and self.last.update == update:
            # If the disk is full, they are still in evaluations.jsonl.
            with contextlib.suppress(OSError, CheckpointDamaged):
                checkpoint = storage.read_manifest(Path(self.last.path))
                storage.replace_manifest(checkpoint, dataclasses.replace(checkpoint.manifest, tested=tested))

    def rollback_to(self, checkpoint: Optional[Checkpoint]) -> None:
        """Continue from a checkpoint, or from the beginning (None): later checkpoints become due again.

        Raises:
            CheckpointNotSaved: it cannot be made the newest of the run folder.
        """
        self._evaluated = (-1, {})
        self._continue_from(checkpoint, self.generation + 1)

    def _continue_from(self, checkpoint: Optional[Checkpoint], generation: int) -> None:
        """Continue from a checkpoint as `generation`, which has not done the updates of later checkpoints."""
        self._begun_update, self.last, self.failed, self._failures = None, None, None, 0
        self._drop_resizes_after(checkpoint.update if checkpoint is not None else 0)
        self._begun_s = time.monotonic()
        if checkpoint is not None:
            self._metrics.know_epoch_sums(checkpoint.update, checkpoint.manifest.epoch_sums)
        own = storage.checkpoints_folder(self._plan.run_dir).resolve()
        if checkpoint is not None and checkpoint.path.parent.resolve() == own:
            try:
                storage.make_newest(checkpoint, generation)
            except OSError as error:
                hint = "it must become newer than the later checkpoints, from which the run does not continue"
                raise CheckpointNotSaved(str(checkpoint.path), error.strerror or str(error), hint) from error
            self._begun_update = checkpoint.update
            manifest = checkpoint.manifest
            self.last = CheckpointSaved(
                checkpoint.update, str(checkpoint.path), manifest.weights_sha256, manifest.ema_sha256
            )

    def _drop_resizes_after(self, update: int) -> None:
        """Forget the changes after `update`; the replicas of now train from there on."""
        kept = [each for each in self.resizes if each["update"] <= update]
        if len(kept) < len(self.resizes):
            before, now = kept[-1]["replicas"] if kept else self._first_replicas, self.resizes[-1]
            kept += [] if now["replicas"] == before else [{**now, "update": update}]
        self.resizes = kept

    def resize(self, plan: Plan, started: InstanceStarted) -> None:
        """Continue with a plan of other replicas; `started` is the report of its instance 0."""
        self._plan, self._started = plan, started

    def add_resize(self, event: Resized) -> None:
        """Record a change of the number of replicas in all further checkpoints."""
        if self.resizes and self.resizes[-1]["replicas"] == event.replicas:
            return  # the checkpoint from which the run resumes has these sizes
        if not self.resizes:
            self._first_replicas = event.replicas_before
        record = {name: getattr(event, name) for name in ("update", "replicas", "gradient_accumulation")}
        self.resizes = [*self.resizes, record]

    def use_new_writer(self, fleet: Fleet) -> None:
        """Make a new instance 0 write the checkpoints; the one that its predecessor had not finished is due again."""
        self._begun_update = self.last.update if self.last is not None else None
        if self._receiver is not None:  # the predecessor may still be alive, on a host that was cut off
            self._receiver.close()
        self._receiver = write_here(fleet, self._plan.run_dir)

    def record(self, report: SaveReport) -> Event:
        """Record whether a checkpoint was written, and return the event for it.

        Raises:
            CheckpointNotSaved: it could not be written, there is no earlier one, and waiting does not help.
        """
        if report.error is None:
            self.last = CheckpointSaved(report.update, report.path, report.weights_sha256, report.ema_sha256)
            self.failed, self._failures = None, 0
            self._add_evaluation()
            return self.last
        if report.can_pass:
            self._failing_since_s = self._failing_since_s if self._failures else time.monotonic()
            self.failed, self._failures = report, self._failures + 1
            if report.update == self._begun_update:
                self._begun_update = None  # the next attempt may succeed
        elif self.last is None:
            hint = "there is no earlier checkpoint, so the run ends here"
            raise CheckpointNotSaved(report.path, report.error, hint)
        previous = self.last.path if self.last is not None else ""
        return CheckpointFailed(report.update, report.path, report.error, previous)

    def not_saved(self, waited_s: float) -> CheckpointNotSaved:
        """Return the error of a run that ends because of `failed`, after a wait for its disk."""
        assert self.failed is not None, "the caller has waited for it"
        waited = f" after {waited_s:.0f} s (--save-retry-s)" if waited_s >= 1 else ""
        hint = "there is no earlier checkpoint; once the disk can be written, repeat the command"
        if self.last is not None:
            resume = f"continue from {self.last.path} with --resume {self._plan.run_dir}"
            hint = f"once the disk can be written, {resume}"
        return CheckpointNotSaved(self.failed.path, f"{self.failed.error}{waited}", hint)

    def check_finite(self, update: UpdateDone) -> None:
        """Raise LossNotFinite if the loss of an update is NaN or infinite, unless --on-nonfinite is continue."""
        is_finite = math.isfinite(update.loss) or not update.has_results
        if is_finite or not self._plan.config.stops_if_not_finite:
            return
        hint = "there is no earlier checkpoint: start again with a lower --learning-rate"
        if self.last is not None:
            hint = f"the last checkpoint is {self.last.path}: --resume it with a lower --learning-rate"
        raise LossNotFinite(update.loss, update.update - 1, update.update, f"{hint}, or use --on-nonfinite continue")

    def finish(self, fleet: Fleet) -> Iterator[Event]:
        """Wait until the checkpoint that was begun last is written, or its disk does not take it: see `failed`.

        Raises:
            CheckpointNotSaved: it could not be written for another reason.
        """
        try:
            reports = fleet.call("finish_saves")[0]
        except FleetBroken as broken:
            yield from self._finished(broken.results.get(0, ()))  # instance 0 does not return them again
            raise
        yield from self._finished(reports)

    def _finished(self, reports: Iterable[SaveReport]) -> Iterator[Event]:
        for report in reports:
            is_lasting = report.error is not None and not report.can_pass
            if is_lasting and report.update == self._begun_update and self.last is not None:
                hint = f"continue from {self.last.path} with --resume {self._plan.run_dir}"
                raise CheckpointNotSaved(report.path, str(report.error), hint)
            yield self.record(report)


def next_generation(plan: Plan, resumed: Optional[Checkpoint]) -> int:
    """Return 1 for a new run, else one more than the newest generation in the run folder or the resumed checkpoint."""
    found, _ = storage.list_checkpoints(storage.checkpoints_folder(plan.run_dir))
    before = [last_generation(plan.run_dir), *(each.manifest.generation for each in found)]
    return 1 + max(before + ([resumed.manifest.generation] if resumed else []))


def load_on(fleet: Fleet, root: int, checkpoint: Checkpoint) -> None:
    """Load a checkpoint of this host in instance `root`.

    Raises:
        CheckpointDamaged: its files differ from their records, or are no checkpoint files.
    """
    arguments = (root, checkpoint, storage.identity(checkpoint.path))
    if not fleet.call("load_checkpoint", *arguments)[root]:
        with contextlib.closing(fleet.serve(CheckpointFiles, str(checkpoint.path))) as server:
            fleet.call("load_checkpoint", *arguments, server)


def write_here(fleet: Fleet, run_dir: str) -> Optional[Server]:
    """Make a new instance 0 write its checkpoints into the run folder of this host.

    Returns the server that receives them; None if the instance has the same folder, on this host or a shared disk.
    """
    checkpoints = storage.checkpoints_folder(run_dir)
    with storage.unique_file(checkpoints) as path:
        if path is not None and fleet.call("has_file", str(path))[0]:
            return None
    server = fleet.serve(CheckpointReceiver, str(checkpoints))
    fleet.call("send_checkpoints_to", server)
    return server


def write_kept(fleet: Fleet, root: int, manifest: Manifest, run_dir: str) -> Tuple[SaveReport, ...]:
    """Write the state that instance `root` has kept after `release` into the run folder of this host."""
    call = functools.partial(fleet.call_on, (root,))
    return write_from_host(
        *(fleet, run_dir),
        has_file=lambda path: call("has_file", path)[root],
        write=lambda server: call("save_kept", manifest, server)[root],
    )


def write_from_host(
    fleet: Fleet,
    run_dir: str,
    has_file: Callable[[str], bool],
    write: Callable[[Optional[Server]], Tuple[SaveReport, ...]],
) -> Tuple[SaveReport, ...]:
    """Write a checkpoint of a process on any host into the run folder of this one.

    `has_file` returns whether that host has a file; `write` writes there, or through the server that it gets.
    """
    checkpoints = storage.checkpoints_folder(run_dir)
    with storage.unique_file(checkpoints) as path:
        has_folder = path is not None and has_file(str(path))
    return write(None) if has_folder else _write_through_server(fleet, checkpoints, write)


def write_kept_into(fleet: Fleet, root: int, manifest: Manifest, folder: Path) -> Tuple[SaveReport, ...]:
    """As `write_kept`, into any folder of this host."""
    call = functools.partial(fleet.call_on, (root,), "save_kept", manifest)
    return _write_through_server(fleet, storage.checkpoints_folder(folder), lambda server: call(server)[root])


def _write_through_server(
    fleet: Fleet, checkpoints: Path, write: Callable[[Optional[Server]], Tuple[SaveReport, ...]]
) -> Tuple[SaveReport, ...]:
    with contextlib.closing(fleet.serve(CheckpointReceiver, str(checkpoints))) as server:
        return write(server)
