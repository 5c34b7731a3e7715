"""Runs that are broken on purpose: faults by name and time, against the weights of a run that nobody disturbs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import struct
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

from raypod.coordinator import coordinator
from raypod.datasets import dataset_size
from raypod.events import Event, InstanceLost, Repaired, RunEnded, UpdateDone
from raypod.fleet.inline import InlineFleet
from raypod.fleet.ray import RayFleet
from raypod.plan.cluster import LOCAL, Cluster
from raypod.plan.plan import Plan, make_plan
from raypod.plan.resolve import from_values
from raypod.record import ledger, run_folder, sinks, verify_data
from raypod.record.metrics import MetricsFold
from raypod.record.sinks import Sinks

UPDATES = 24
_CALLS_BETWEEN = 3


def plan_for(folder: Path, cluster: Cluster = LOCAL, **sections: Dict[str, Any]) -> Plan:
    """4 replicas in 2 instances on digits, with BatchNorm."""
    run = {"device": "emulated", "max_restarts": 9, "tensorboard": True, **sections.get("run", {})}
    training = {"updates": UPDATES, **sections.get("training", {})}
    config = from_values({**sections, "run": run, "training": training})
    plan = make_plan(config, cluster, dataset_size(config), str(folder / "run"))
    run_folder.open_for(plan)
    return plan


def pid_of(plan: Plan, instance: int) -> int:
    """Of the newest process of an instance: each writes it into the log file."""
    return int(Path(plan.log_file(instance)).read_text().rpartition(", pid ")[2].partition(":")[0])


def send(number: int, *instances: int) -> Callable[[Plan], None]:
    """A fault: a signal to these instances."""

    def plant(plan: Plan) -> None:
        for instance in instances:
            os.kill(pid_of(plan, instance), number)

    return plant


@dataclasses.dataclass
class Told:
    """What a run said."""

    events: List[Event]

    def of(self, kind: type) -> List[Any]:
        """The events of one type."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def sha256(self) -> str:
        """Of the final weights."""
        (ended,) = self.of(RunEnded)
        return str(ended.weights_sha256)

    @property
    def updates(self) -> List[int]:
        """As they were told."""
        return [event.update for event in self.of(UpdateDone)]

    @property
    def losses(self) -> List[InstanceLost]:
        """The instances that were given up."""
        return self.of(InstanceLost)

    @property
    def repairs(self) -> List[Repaired]:
        """What was done about it."""
        return self.of(Repaired)


def run(plan: Plan, faults: Sequence[Tuple[int, Callable[[Plan], None]]] = (), are_repaired: bool = True) -> Told:
    """Run a plan; each fault (update, what to do) is planted as soon as that update is told.

    Where they need a repair, not before the one before it is repaired and all have done some calls since: a first call
    has a longer bound.

    The run folder gets its files as by the command, so that `verify-data` can look at it.
    """
    fleet = InlineFleet(plan) if plan.config.run.fleet == "inline" else RayFleet(plan)
    left, quiet_until = list(faults), 0
    told = Told([])
    with Sinks(plan) as sinks, contextlib.closing(coordinator.run(plan, fleet, MetricsFold(plan, 0.0))) as events:
        for event in events:
            sinks.take(event)
            told.events.append(event)
            if isinstance(event, Repaired):
                quiet_until = event.update + _CALLS_BETWEEN
            is_repaired = not are_repaired or len(told.repairs) >= len(faults) - len(left)
            if left and is_repaired and isinstance(event, UpdateDone) and event.update >= max(left[0][0], quiet_until):
                left.pop(0)[1](plan)
    return told


def assert_undisturbed(plan: Plan, told: Told, sha256: str) -> None:
    """The weights are those of `sha256`, and each update and each sample was there once."""
    folder = Path(plan.run_dir)
    assert told.sha256 == sha256
    assert told.updates == list(range(1, plan.total_updates + 1))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines] == told.updates
    assert _curve(folder) == told.updates
    lives = [line for line in ledger.read(folder / ledger.NAME)[0] if isinstance(line, ledger.LifeBegun)]
    begun = [(1, 0), *((repair.generation, repair.update) for repair in told.repairs)]
    assert [(life.generation, life.update) for life in lives] == begun
    assert [generation for generation, _ in begun] == list(range(1, 2 + len(told.repairs)))
    told_of = [line for line in verify_data.verify(folder).lines if line.startswith("NOT PROVED: ")]
    # What a lost instance fed to its last call may be known to nobody; everything else is proved.
    calls = [line for line in told_of if line.startswith("NOT PROVED: the call ")]
    ends = [f"instance {loss.instance} reported no digest; its report was lost with it" for loss in told.losses]
    assert len(calls) <= len(ends)
    assert all(line.endswith(tuple(ends)) for line in calls), calls
    epochs = [line for line in told_of if line not in calls]  # that such a call belongs to
    assert len(epochs) <= len(calls)
    assert all(line.endswith("of its samples are not proved to be seen") for line in epochs), epochs


def _curve(folder: Path) -> List[int]:
    """The updates of TensorBoard's loss curve, in the order of the file (`raypod/record/tensorboard.py`)."""
    (path,) = (folder / sinks.FOLDER).iterdir()
    content, updates = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        record, content = content[12 : 12 + length], content[16 + length :]
        if b"training/loss" in record:
            low, high = record[10], record[11]  # a varint, after the time and the field's number
            updates.append(low if low < 0x80 else low - 0x80 + (high << 7))
    return updates
