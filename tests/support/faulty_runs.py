"""Runs with injected faults, and the comparison with a run without faults."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

import pytest

from raypod.events import EvaluationDone, Event, InstanceLost, Repaired, RunEnded, UpdateDone
from raypod.plan import layout
from raypod.plan.cluster import LOCAL, Cluster
from raypod.plan.plan import Plan, make_plan, window_of
from raypod.plan.resolve import from_values, task_of_values
from raypod.runs import ledger, run_folder, verify_data
from raypod.runs.metrics import MetricsAggregator
from raypod.runs.profile import ProfileSource, ProfileWriter
from raypod.runs.sinks import Sinks
from raypod.runtime.coordinator import coordinator
from raypod.runtime.workers.inline import InlineFleet
from raypod.runtime.workers.ray import RayFleet
from raypod.training.checkpoint.resume import find_checkpoint
from raypod.training.tasks.registry import facts_of, schema_of
from tests.support.event_files import scalars

UPDATES = 24
_CALLS_BETWEEN = 3


def plan_for(folder: Path, cluster: Cluster = LOCAL, **sections: Dict[str, Any]) -> Plan:
    """Plan 4 replicas; by default on digits, with batch normalization."""
    run = {"device": "emulated", "max_restarts": 9, "tensorboard": True, **sections.get("run", {})}
    training = {"updates": UPDATES, **sections.get("training", {})}
    schema = schema_of(task_of_values(sections))
    config = from_values({**sections, "run": run, "training": training}, schema=schema)
    plan = make_plan(config, cluster, facts_of(config), str(folder / "run"))
    run_folder.create(plan)
    return plan


def pid_of(plan: Plan, instance: int) -> int:
    """Return the pid of an instance's newest process, which each process writes to the log file."""
    return int(Path(plan.log_file(instance)).read_text().rpartition(", pid ")[2].partition(":")[0])


def starts(plan: Plan) -> List[int]:
    """Return how many processes each instance had."""
    logs = [Path(plan.log_file(index)).read_text() for index in range(plan.geometry.num_instances)]
    return [log.count(", pid ") for log in logs]


def send(number: int, *instances: int) -> Callable[[Plan], None]:
    """Return a fault that sends a signal to these instances."""

    def inject(plan: Plan) -> None:
        for instance in instances:
            os.kill(pid_of(plan, instance), number)

    return inject


@dataclasses.dataclass
class Outcome:
    """The events of a run."""

    events: List[Event]

    def of(self, kind: type) -> List[Any]:
        """Return the events of one type."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def ended(self) -> RunEnded:
        """The end of the run."""
        (ended,) = self.of(RunEnded)
        assert isinstance(ended, RunEnded)
        return ended

    @property
    def sha256(self) -> str:
        """The hash of the final weights."""
        return self.ended.weights_sha256

    @property
    def updates(self) -> List[int]:
        """The updates, in the order of their events."""
        return [event.update for event in self.of(UpdateDone)]

    @property
    def losses(self) -> List[InstanceLost]:
        """The lost instances."""
        return self.of(InstanceLost)

    @property
    def lost(self) -> List[Tuple[int, str]]:
        """The lost instances: (index, kind)."""
        return [(loss.instance, loss.kind) for loss in self.losses]

    @property
    def repairs(self) -> List[Repaired]:
        """The repairs."""
        return self.of(Repaired)


def run(plan: Plan, faults: Sequence[Tuple[int, Callable[[Plan], object]]] = (), are_repaired: bool = True) -> Outcome:
    """Run or resume a plan; inject each fault (update, action) once that update is done. Write the run folder's files.

    With `are_repaired`, a fault waits until the previous one is repaired and all instances have done some calls since,
    because the first call has a longer timeout.
    """
    fleet = InlineFleet(plan) if plan.config.run.fleet == "inline" else RayFleet(plan)
    left, quiet_until = list(faults), 0
    outcome = Outcome([])
    with contextlib.ExitStack() as stack:
        recorders: List[Any] = [stack.enter_context(Sinks(plan))]
        window = window_of(plan)
        if window is not None:
            source = ProfileSource(fleet.clocks, lambda: fleet.call("take_profile"))
            recorders.append(stack.enter_context(ProfileWriter(plan, window, source, pytest.fail, time.monotonic())))
        resumed = find_checkpoint(plan).checkpoint if plan.config.run.resume else None
        events = coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0), resumed)
        for event in stack.enter_context(contextlib.closing(events)):
            for recorder in recorders:
                recorder.on_event(event)
            outcome.events.append(event)
            if isinstance(event, Repaired):
                quiet_until = event.update + _CALLS_BETWEEN
            is_repaired = not are_repaired or len(outcome.repairs) >= len(faults) - len(left)
            if left and is_repaired and isinstance(event, UpdateDone) and event.update >= max(left[0][0], quiet_until):
                left.pop(0)[1](plan)
    return outcome


def assert_undisturbed(plan: Plan, outcome: Outcome, undisturbed: Outcome) -> None:
    """Assert that weights, updates and evaluations are those of a run without faults, and each sample was seen once."""
    folder = Path(plan.run_dir)
    assert outcome.sha256 == undisturbed.sha256
    assert outcome.ended.ema_sha256 == undisturbed.ended.ema_sha256
    assert outcome.updates == list(range(1, plan.total_updates + 1))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    expected = [(event.update, event.metrics) for event in undisturbed.of(UpdateDone)]
    names = [metric.name for metric in plan.task.metrics]
    assert [(line["update"], {name: line[name] for name in names}) for line in lines] == expected
    assert outcome.of(EvaluationDone) == undisturbed.of(EvaluationDone)
    assert [step for step, _ in scalars(folder)["training/loss"]] == outcome.updates
    generations = [
        line for line in ledger.read(folder / layout.LEDGER)[0] if isinstance(line, ledger.GenerationStarted)
    ]
    begun = [(1, 0), *((repair.generation, repair.update) for repair in outcome.repairs)]
    assert [(line.generation, line.update) for line in generations] == begun
    assert [generation for generation, _ in begun] == list(range(1, 2 + len(outcome.repairs)))
    verdict = verify_data.verify(folder)
    assert verdict.is_proved, verdict.lines
