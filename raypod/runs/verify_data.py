"""`raypod verify-data RUN`: prove from the ledger that each epoch saw each sample exactly once.

The order is recomputed from the run's config and compared with the digests of the samples that the instances gathered.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

from raypod.errors import ConfigError
from raypod.plan import layout, resolve
from raypod.plan.plan import Geometry, Plan
from raypod.runs import ledger, run_folder
from raypod.runs.ledger import CallRecord, GenerationStarted, Line
from raypod.system.command_line import counted
from raypod.system.files import parse_json
from raypod.training.checkpoint import storage
from raypod.training.checkpoint.format import Checkpoint
from raypod.training.data.order import call_positions, epoch_order, in_place_of, samples_digest


@dataclasses.dataclass(frozen=True)
class Order:
    """What determines the order of a run's samples.

    The number of instances may change between generations, and in an elastic run that of the replicas, with the same
    global batch.
    """

    geometry: Geometry
    seed: int
    train_samples: int
    shards: Tuple[int, ...] = ()  # the samples of each, if `window` of them are shuffled together
    window: Optional[int] = None

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples of an epoch: a multiple of the samples per call; the remainder is left out."""
        return self.geometry.calls_per_epoch(self.train_samples) * self.geometry.samples_per_call


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The findings, one per line, and whether the ledger proves the run."""

    lines: Tuple[str, ...]
    is_proved: bool


def order_of(run_dir: Path) -> Order:
    """Read the order from the files of a run folder. ConfigError if they are missing or invalid."""
    path = run_dir / layout.PLAN
    try:
        described = parse_json(path.read_text())
        sizes = {field.name: described["geometry"][field.name] for field in dataclasses.fields(Geometry)}
        size = described["dataset"]
        path = run_dir / layout.CONFIG
        config = resolve.read_yaml(path)
        seed, window = int(config["training"]["seed"]), config.get("data", {}).get("shuffle_window")
        return Order(Geometry(**sizes), seed, int(size["train_samples"]), tuple(size.get("shards", ())), window)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}, from which the order of the samples follows, is damaged: {error}") from None


def verify(run_dir: Path) -> Verdict:
    """Check the ledger of a run folder. ConfigError if there is none."""
    path = run_dir / layout.LEDGER
    if not path.is_file():
        raise ConfigError(f"{run_dir} has no {layout.LEDGER}; is it the folder of a run?")
    lines, unreadable = ledger.read(path)
    order = order_of(run_dir)
    return check_ledger(order, lines, unreadable, _missing_end(run_dir, order, lines))


def check_ledger(order: Order, lines: List[Line], unreadable: List[int], missing_end: Sequence[str] = ()) -> Verdict:
    """Check the lines of a ledger. `unreadable` are line numbers; `missing_end` are further findings."""
    calls, geometries, notes = _calls_in_effect(order, lines)
    left_out = {line.generation: line.left_out for line in lines if isinstance(line, GenerationStarted)}
    # No fault by itself: if a truncated call was not repeated, its updates are missing below.
    notes += [f"line {number} of the ledger cannot be read" for number in unreadable]
    faults = [*missing_end, *_gaps(order, calls)]
    checker = _Checker(order)
    for call in calls:
        faults += checker.check_call(call, geometries[call.generation], left_out.get(call.generation, ()))
    notes += checker.epochs()
    faults += checker.miscounted()
    updates = len(calls) * order.geometry.device_iterations
    if not calls:
        faults.append("the ledger has no calls")
    exception = ", except those left out and in their places" if any(left_out.values()) else ""
    order_of_samples = f"every sample at most once in each epoch and exactly once in each whole one{exception}"
    end = f"proved: {counted(updates, 'update')}, {order_of_samples}"
    return Verdict((*notes, *(f"NOT PROVED: {fault}" for fault in faults), *([] if faults else [end])), not faults)


def _missing_end(run_dir: Path, order: Order, lines: List[Line]) -> List[str]:
    """Compare the end of the ledger with the checkpoints and the metrics; return what the ledger lacks."""
    calls = _calls_in_effect(order, lines)[0]
    end, last_recorded = (  # of the calls in effect, and of all calls
        max((call.update + order.geometry.device_iterations for call in each), default=0)
        for each in (calls, [line for line in lines if isinstance(line, CallRecord)])
    )
    generation = max((line.generation for line in lines), default=0)
    where = f"the ledger ends after update {end} (generation {generation}), but"
    faults = []
    checkpoints, _ = storage.list_checkpoints(storage.checkpoints_folder(run_dir))
    newest = checkpoints[0] if checkpoints else None
    if newest is not None and (generation, end) < (newest.manifest.generation, newest.update):
        faults.append(f"{where} {newest.path.name} (generation {newest.manifest.generation}) is newer")
    last = run_folder.last_update(run_dir)
    # After a rollback the metrics are ahead of `end`, but not of the superseded calls.
    if last is not None and last.update > last_recorded:
        faults.append(f"{where} {layout.METRICS} reaches update {last.update}")
    return faults


def lost_lines(plan: Plan, checkpoint: Checkpoint) -> Optional[str]:
    """Return which lines before a checkpoint its run folder lacks, from which the run resumes; None if it has all.

    They are flushed to disk before the checkpoint: the disk has lost them, as can happen with the power.
    """
    run_dir = Path(plan.run_dir)
    if run_dir.resolve() != checkpoint.path.resolve().parents[1]:
        return None  # another run folder, which has no lines before its first update
    recorded, done = ledger.last_call(run_dir), run_folder.last_update(run_dir)
    ends = {
        layout.LEDGER: 0 if recorded is None else recorded.update + plan.geometry.device_iterations,
        layout.METRICS: 0 if done is None else done.update,
    }
    lost = [f"{name} ends after update {end}" for name, end in ends.items() if end < checkpoint.update]
    if not lost:
        return None
    unproved = "; raypod verify-data proves no later update before it" if layout.LEDGER in lost[0] else ""
    return f"{' and '.join(lost)}, before {checkpoint.path.name}: the disk has lost the lines up to there{unproved}"


def _calls_in_effect(order: Order, lines: List[Line]) -> Tuple[List[CallRecord], Dict[int, Geometry], List[str]]:
    """Return the calls that are not superseded, the sizes by generation, and notes on the generations."""
    calls: List[CallRecord] = []
    geometries: Dict[int, Geometry] = {}
    notes: List[str] = []
    replicas: Optional[int] = None
    for line in lines:
        if isinstance(line, GenerationStarted):
            superseded = [call for call in calls if call.update >= line.update]
            calls = [call for call in calls if call.update < line.update]
            sizes = geometries[line.generation] = line.geometry(order.geometry)
            is_resized, replicas = replicas not in (None, sizes.total_replicas), sizes.total_replicas
            if line.left_out:
                named = ", ".join(map(str, line.left_out))
                notes.append(f"generation {line.generation} leaves out samples {named}: the next one is in each place")
            if line.generation > 1:
                updates = len(superseded) * order.geometry.device_iterations
                all_replicas = (
                    f"{counted(sizes.total_replicas, 'replica')} x accumulation {sizes.gradient_accumulation}"
                )
                resized = f"; {all_replicas}" if is_resized else ""
                note = f"generation {line.generation} began after update {line.update}: {updates} superseded{resized}"
                notes.append(note)
        else:
            geometries.setdefault(line.generation, order.geometry)
            calls.append(line)
    return calls, geometries, notes


def _gaps(order: Order, calls: List[CallRecord]) -> List[str]:
    """Return the updates that are missing or duplicated."""
    faults = []
    expected = 0
    for call in sorted(calls, key=lambda each: each.update):
        if call.update > expected:
            faults.append(f"updates {expected + 1} to {call.update} are not in the ledger")
        elif call.update < expected:
            faults.append(f"update {call.update + 1} is recorded twice")
        expected = max(expected, call.update + order.geometry.device_iterations)
    return faults


class _Checker:
    """Compares each call with the order, and counts how often each epoch saw each sample."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._epoch: Optional[int] = None
        self._samples = np.zeros(0, dtype=np.int64)
        self._seen: Dict[int, np.ndarray] = {}

    def check_call(self, call: CallRecord, geometry: Geometry, left_out: Sequence[int] = ()) -> List[str]:
        """Return the faults of a call of a generation with these sizes. One that is left out counts as its place."""
        order = self._order
        where = f"the call at update {call.update + 1}"
        if geometry.global_batch_size != order.geometry.global_batch_size:
            batches = f"{geometry.global_batch_size} samples, not {order.geometry.global_batch_size}"
            return [f"{where} is of generation {call.generation}, whose updates have {batches}"]
        per_epoch = geometry.updates_per_epoch(order.train_samples)
        epoch, in_epoch = divmod(call.update, per_epoch)
        expected = (epoch, in_epoch * geometry.global_batch_size, geometry.samples_per_call)
        if (call.epoch, call.position, call.count) != expected or in_epoch % geometry.device_iterations:
            found = (call.epoch, call.position, call.count)
            return [f"{where} has (epoch, position, count) {found}, not {expected}"]
        if epoch != self._epoch:
            self._epoch = epoch
            self._samples = epoch_order(order.seed, epoch, order.train_samples, order.shards, order.window)
        faults = []
        seen = self._seen.setdefault(epoch, np.zeros(order.train_samples, dtype=np.int64))
        for instance in range(geometry.num_instances):
            samples = self._samples[call_positions(geometry, instance, in_epoch // geometry.device_iterations)]
            found_digest = call.digests.get(instance)
            if found_digest is None:
                faults.append(f"{where}: instance {instance} reported no digest; its report was lost with it")
            elif found_digest != samples_digest(in_place_of(left_out, samples, order.train_samples)):
                faults.append(f"{where}: instance {instance} gathered samples that differ from the order")
            else:
                seen[samples] += 1
        return faults

    def epochs(self) -> List[str]:
        """Return one line per epoch."""
        per_epoch, total = self._order.samples_per_epoch, self._order.train_samples
        left = f"; {total - per_epoch} left out, less than a call" if total > per_epoch else ""
        return [
            f"epoch {epoch + 1}: {int((seen == 1).sum())} of {per_epoch} samples seen exactly once{left}"
            for epoch, seen in sorted(self._seen.items())
        ]

    def miscounted(self) -> List[str]:
        """Return the epochs with repeated samples, and the finished epochs with missing ones."""
        faults = []
        last = max(self._seen, default=0)
        for epoch, seen in sorted(self._seen.items()):
            twice = np.flatnonzero(seen > 1)
            if len(twice):
                faults.append(
                    f"epoch {epoch + 1} saw {len(twice)} samples more than once, for example sample {twice[0]}"
                )
            missing = self._order.samples_per_epoch - int((seen > 0).sum())
            if missing and epoch < last:
                faults.append(f"epoch {epoch + 1} is finished, and {missing} of its samples are not proved to be seen")
        return faults
