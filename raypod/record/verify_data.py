"""`python -m raypod verify-data RUN`: whether each epoch saw each sample exactly once, proved from the ledger.

The order is computed again from the run's own config and compared with the digests of what the instances gathered.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

from raypod.checkpoint import format
from raypod.datasets.order import call_positions, digest, epoch_order
from raypod.errors import ConfigError
from raypod.plan import resolve
from raypod.plan.plan import Geometry
from raypod.record import ledger, run_folder
from raypod.record.ledger import CallFed, LifeBegun, Line


@dataclasses.dataclass(frozen=True)
class Order:
    """What the order of a run's samples follows from; the number of instances may change from life to life."""

    geometry: Geometry
    seed: int
    train_samples: int

    @property
    def samples_per_epoch(self) -> int:
        """Samples that an epoch visits: whole calls; the rest is left out of it."""
        return self.geometry.calls_per_epoch(self.train_samples) * self.geometry.samples_per_call


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was found, line by line, and whether it is a proof."""

    lines: Tuple[str, ...]
    is_proved: bool


def order_of(run_dir: Path) -> Order:
    """Out of the files of a run folder. ConfigError if it is none."""
    try:
        described = json.loads((run_dir / "plan.json").read_text())
        sizes = {field.name: described["geometry"][field.name] for field in dataclasses.fields(Geometry)}
        seed = resolve.load_yaml(run_dir / "config.yaml").training.seed
        return Order(Geometry(**sizes), seed, int(described["dataset"]["train_samples"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{run_dir} is no run folder that can be read: {error}") from None


def verify(run_dir: Path) -> Verdict:
    """Check the ledger of a run folder. ConfigError if it has none."""
    path = run_dir / ledger.NAME
    if not path.is_file():
        raise ConfigError(f"{run_dir} has no {ledger.NAME}; is it the folder of a run?")
    lines, unreadable = ledger.read(path)
    order = order_of(run_dir)
    return judge(order, lines, unreadable, _missing_end(run_dir, order, lines))


def judge(order: Order, lines: List[Line], unreadable: List[int], missing_end: Sequence[str] = ()) -> Verdict:
    """What the lines of a ledger prove about the samples of each epoch; `missing_end`: what else is known, in words."""
    calls, instances, told = _effective(order, lines)
    # Cut off by a kill, and done again since; if it was not, its updates are missing.
    told += [f"line {number} of the ledger cannot be read" for number in unreadable]
    faults = [*missing_end, *_gaps(order, calls)]
    checker = _Checker(order)
    for call in calls:
        faults += checker.faults_of(call, instances[call.generation])
    told += checker.epochs()
    faults += checker.repeated()
    updates = len(calls) * order.geometry.device_iterations
    if not calls:
        faults.append("the ledger has no calls")
    end = f"proved: {updates} updates, every sample at most once in each epoch and exactly once in each whole one"
    return Verdict((*told, *(f"NOT PROVED: {fault}" for fault in faults), *([] if faults else [end])), not faults)


def _missing_end(run_dir: Path, order: Order, lines: List[Line]) -> List[str]:
    """What the other files of a run say that it did after the end of its ledger, in words."""
    calls = _effective(order, lines)[0]
    end, ever = (
        max((call.update + order.geometry.device_iterations for call in each), default=0)
        for each in (calls, [line for line in lines if isinstance(line, CallFed)])
    )
    life = max((line.generation for line in lines), default=0)
    told = f"the ledger ends after update {end} (generation {life}), and"
    faults = []
    checkpoints, _ = format.found_in(format.folder_of(run_dir))
    newest = checkpoints[0] if checkpoints else None
    if newest is not None and (life, end) < (newest.manifest.generation, newest.update):
        faults.append(f"{told} {newest.path.name} (generation {newest.manifest.generation}) was made later")
    last = run_folder.last_update(run_dir)
    # After a step back the metrics are ahead, and so is what the ledger had before it.
    if last is not None and last.update > ever:
        faults.append(f"{told} {run_folder.METRICS} goes on to update {last.update}")
    return faults


def _effective(order: Order, lines: List[Line]) -> Tuple[List[CallFed], Dict[int, int], List[str]]:
    """The calls that made the weights, the instances of each generation, and what was superseded, in words."""
    calls: List[CallFed] = []
    instances: Dict[int, int] = {}
    told: List[str] = []
    for line in lines:
        if isinstance(line, LifeBegun):
            superseded = [call for call in calls if call.update >= line.update]
            calls = [call for call in calls if call.update < line.update]
            instances[line.generation] = line.instances
            if line.generation > 1:
                updates = len(superseded) * order.geometry.device_iterations
                told.append(f"generation {line.generation} began after update {line.update}: {updates} superseded")
        else:
            instances.setdefault(line.generation, order.geometry.num_instances)
            calls.append(line)
    return calls, instances, told


def _gaps(order: Order, calls: List[CallFed]) -> List[str]:
    """Updates that no call made, or more than one."""
    faults = []
    expected = 0
    for call in sorted(calls, key=lambda each: each.update):
        if call.update > expected:
            faults.append(f"updates {expected + 1} to {call.update} are not in the ledger")
        elif call.update < expected:
            faults.append(f"update {call.update + 1} was made twice")
        expected = max(expected, call.update + order.geometry.device_iterations)
    return faults


class _Checker:
    """Compares call after call with the order, and counts how often each sample was seen."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._epoch: Optional[int] = None
        self._samples = np.zeros(0, dtype=np.int64)
        self._seen: Dict[int, np.ndarray] = {}

    def faults_of(self, call: CallFed, instances: int) -> List[str]:
        """What is wrong with a call, in words."""
        order, geometry = self._order, dataclasses.replace(self._order.geometry, num_instances=instances)
        where = f"the call at update {call.update + 1}"
        per_epoch = geometry.updates_per_epoch(order.train_samples)
        epoch, in_epoch = divmod(call.update, per_epoch)
        expected = (epoch, in_epoch * geometry.global_batch_size, geometry.samples_per_call)
        if (call.epoch, call.position, call.count) != expected or in_epoch % geometry.device_iterations:
            found = (call.epoch, call.position, call.count)
            return [f"{where} has (epoch, position, count) {found}, not {expected}"]
        if epoch != self._epoch:
            self._epoch, self._samples = epoch, epoch_order(order.seed, epoch, order.train_samples)
        faults = []
        seen = self._seen.setdefault(epoch, np.zeros(order.train_samples, dtype=np.int64))
        for instance in range(instances):
            samples = self._samples[call_positions(geometry, instance, in_epoch // geometry.device_iterations)]
            told = call.digests.get(instance)
            if told is None:
                faults.append(f"{where}: instance {instance} reported no digest; its report was lost with it")
            elif told != digest(samples):
                faults.append(f"{where}: instance {instance} gathered other samples than the order has there")
            else:
                seen[samples] += 1
        return faults

    def epochs(self) -> List[str]:
        """One line for each epoch."""
        per_epoch, total = self._order.samples_per_epoch, self._order.train_samples
        left = f"; {total - per_epoch} left out, less than a call" if total > per_epoch else ""
        return [
            f"epoch {epoch + 1}: {int((seen == 1).sum())} of {per_epoch} samples seen exactly once{left}"
            for epoch, seen in sorted(self._seen.items())
        ]

    def repeated(self) -> List[str]:
        """Samples that an epoch saw more than once, or an epoch that is over did not see, in words."""
        faults = []
        last = max(self._seen, default=0)
        for epoch, seen in sorted(self._seen.items()):
            twice = np.flatnonzero(seen > 1)
            if len(twice):
                faults.append(f"epoch {epoch + 1} saw {len(twice)} samples more than once, as sample {twice[0]}")
            missing = self._order.samples_per_epoch - int((seen > 0).sum())
            if missing and epoch < last:
                faults.append(f"epoch {epoch + 1} is over, and {missing} of its samples are not proved to be seen")
        return faults
