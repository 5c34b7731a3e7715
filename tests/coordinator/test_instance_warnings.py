"""The warnings of instances are events, each once."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any, Callable, List

import pytest

from raypod.api.training import LogReporter, Training
from raypod.coordinator import coordinator
from raypod.events import CallReport, InstanceWarned
from raypod.fleet.scripted import ScriptedFleet
from raypod.plan.plan import Plan
from raypod.record.metrics import MetricsAggregator


class WarningFleet(ScriptedFleet):
    """Every call warns of the same, and the evaluation of something else."""

    def reports(self, update: int) -> List[CallReport]:
        first, *others = super().reports(update)
        return [dataclasses.replace(first, warnings=("UserWarning: the sizes differ",)), *others]

    def call(self, method: str, *arguments: Any) -> List[Any]:
        found = super().call(method, *arguments)
        if method != "evaluate":
            return found
        return [
            dataclasses.replace(found[0], warnings=("in the evaluation", "UserWarning: the sizes differ")),
            *found[1:],
        ]


def test_each_warning_is_an_event_once(make: Callable[..., Plan]) -> None:
    plan = make(training={"epochs": 2})
    events = coordinator.run(plan, WarningFleet(plan), MetricsAggregator(plan, 0.0))
    warned = [event for event in events if isinstance(event, InstanceWarned)]
    assert [(event.instance, event.text) for event in warned] == [
        (0, "UserWarning: the sizes differ"),
        (0, "in the evaluation"),
    ]
    assert warned[0].log_file == plan.log_file(0)


def test_the_user_is_warned(make: Callable[..., Plan], caplog: pytest.LogCaptureFixture) -> None:
    run: Any = SimpleNamespace(plan=make(), found=None, claim=SimpleNamespace(folder=None))
    training = Training.__new__(Training)
    training._run, training._reporter, training._last_events = run, LogReporter(), {}
    with caplog.at_level(logging.WARNING, "raypod"):
        training._record(InstanceWarned(0, "UserWarning: x", "logs/instance-0.log"), [])
    assert caplog.messages == ["UserWarning: x (instance 0; its log: logs/instance-0.log)"]
