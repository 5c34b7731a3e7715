"""Runs that are broken on purpose: faults by name and time, against the weights of a run that nobody disturbs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

from raypod import coordinator
from raypod.cluster import LOCAL, Cluster
from raypod.config import from_values
from raypod.datasets import dataset_size
from raypod.events import Event, InstanceLost, Repaired, RunEnded, UpdateDone
from raypod.fleet.inline import InlineFleet
from raypod.fleet.ray import RayFleet
from raypod.metrics import MetricsFold
from raypod.plan import Plan, make_plan
from raypod.record import run_folder, verify_data
from raypod.record.sinks import Sinks

UPDATES = 24
# 2.10 neither ends a frozen process nor frees its place: the run ends, in one line; and its `cluster_utils` refuses to
# end nodes on several addresses of one machine.
HAS_OLD_RAY = tuple(int(part) for part in version("ray").split(".")[:2]) < (2, 50)
_CALLS_BETWEEN = 3


def plan_for(folder: Path, cluster: Cluster = LOCAL, **sections: Dict[str, Any]) -> Plan:
    """4 replicas in 2 instances on digits, with BatchNorm."""
    run = {"device": "emulated", "max_restarts": 9, **sections.get("run", {})}
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


def run(plan: Plan, faults: Sequence[Tuple[int, Callable[[Plan], None]]] = ()) -> Told:
    """Run a plan; each fault (update, what to do) is planted as soon as that update is told.

    Not before the one before it is repaired and all have done some calls since: a first call has a longer bound.

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
            is_repaired = len(told.repairs) >= len(faults) - len(left)
            if left and is_repaired and isinstance(event, UpdateDone) and event.update >= max(left[0][0], quiet_until):
                left.pop(0)[1](plan)
    return told


def assert_undisturbed(plan: Plan, told: Told, sha256: str) -> None:
    """The weights are those of `sha256`, and each update and each sample was there once."""
    assert told.sha256 == sha256
    assert told.updates == list(range(1, plan.total_updates + 1))
    lines = (Path(plan.run_dir) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines] == told.updates
    told_of = [line for line in verify_data.verify(Path(plan.run_dir)).lines if line.startswith("NOT PROVED: ")]
    # What a lost instance fed to its last call may be known to nobody; everything else is proved.
    calls = [line for line in told_of if line.startswith("NOT PROVED: the call ")]
    ends = [f"instance {loss.instance} reported no digest; its report was lost with it" for loss in told.losses]
    assert len(calls) <= len(ends)
    assert all(line.endswith(tuple(ends)) for line in calls), calls
    epochs = [line for line in told_of if line not in calls]  # that such a call belongs to
    assert len(epochs) <= len(calls)
    assert all(line.endswith("of its samples are not proved to be seen") for line in epochs), epochs
