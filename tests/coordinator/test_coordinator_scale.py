"""The coordinator with the number of instances of a large pod. The fleet is scripted: only the coordinator works."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Callable, List

from raypod.coordinator import coordinator
from raypod.events import EvaluationDone, Event, RunEnded, UpdateDone
from raypod.fleet.scripted import ScriptedFleet
from raypod.plan.plan import Plan
from raypod.record.metrics import MetricsAggregator

UPDATES = 10


def plan_of(make: Callable[..., Plan], instances: int) -> Plan:
    return make(
        training={"updates": UPDATES, "batch_size": 1}, pod={"replicas": 2 * instances, "num_instances": instances}
    )


def test_a_run_of_256_instances_yields_every_update(make: Callable[..., Plan]) -> None:
    plan = plan_of(make, 256)
    fleet = ScriptedFleet(plan)
    events: List[Event] = list(coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0)))
    updates = [event for event in events if isinstance(event, UpdateDone)]
    assert [event.update for event in updates] == list(range(1, UPDATES + 1))
    mean = sum(1 / (1 + instance) for instance in range(256)) / 256
    assert all(abs(event.loss - mean) < 1e-12 for event in updates)
    assert all(abs(event.metrics["accuracy"] - 100 * mean) < 1e-10 for event in updates)
    assert [event.samples for event in events if isinstance(event, EvaluationDone)] == [256]
    assert isinstance(events[-1], RunEnded)
    assert not events[-1].interrupted


def instructions(plan: Plan) -> int:
    """Count the bytecode instructions that the coordinator and its callees execute for a run."""
    fleet, metrics, counted = ScriptedFleet(plan), MetricsAggregator(plan, 0.0), 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal counted
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counted += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in coordinator.run(plan, fleet, metrics):
            pass
    finally:
        sys.settrace(before)
    return counted


def test_the_work_per_update_grows_no_faster_than_the_instances(make: Callable[..., Plan]) -> None:
    few, many = (instructions(plan_of(make, instances)) for instances in (32, 256))
    assert few < many <= 8 * few
