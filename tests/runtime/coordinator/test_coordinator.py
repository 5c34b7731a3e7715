"""The main loop with scripted fleets: many instances, warnings of instances, and checkpoints at time intervals."""

from __future__ import annotations

import dataclasses
import logging
import sys
from types import FrameType, SimpleNamespace
from typing import Any, Callable, Iterator, List, Optional

import pytest

from raypod.errors import ConfigError
from raypod.events import CallReport, EvaluationDone, InstanceWarned, RunEnded, UpdateDone
from raypod.plan.plan import Plan, Segment
from raypod.runs.callback import Reporter
from raypod.runtime.coordinator import checkpoint_schedule
from raypod.runtime.workers.scripted import ScriptedFleet
from raypod.training.checkpoint.format import Checkpoint
from raypod.training.checkpoint.resume import manifest_of
from raypod.training.checkpoint.storage import checkpoint_path, checkpoints_folder, new_checkpoint, write_manifest
from tests.support.scripted_runs import events_of, of, only, updates_of

Make = Callable[..., Plan]


def plan_of(make: Make, instances: int) -> Plan:
    return make(training={"updates": 10, "batch_size": 1}, pod={"replicas": 2 * instances, "num_instances": instances})


def test_a_run_of_256_instances_yields_every_update(make: Make) -> None:
    plan = plan_of(make, 256)
    events = events_of(plan, ScriptedFleet(plan))
    assert updates_of(events) == list(range(1, 11))
    mean = sum(1 / (1 + instance) for instance in range(256)) / 256
    for event in of(events, UpdateDone):
        assert (event.loss, event.metrics["accuracy"]) == (pytest.approx(mean), pytest.approx(100 * mean))
    assert only(events, EvaluationDone).samples == 256
    assert not only(events[-1:], RunEnded).interrupted


def test_hosts_with_other_files_of_raypod_or_another_torch_are_an_error(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(make, 3)
    fleet = ScriptedFleet(plan)
    first, *others = fleet.start()
    other = dataclasses.replace(others[-1], host="another", sources="c")
    started = [dataclasses.replace(first, sources="a"), dataclasses.replace(others[0], sources="b"), other]
    monkeypatch.setattr(fleet, "start", lambda: started)  # instance 1 started on the same host, after an edit
    words = r"files on host another of instance 2 differ from .* \(sha256 c and a\); `raypod up FILE` copies the same"
    with pytest.raises(ConfigError, match=words):
        events_of(plan, fleet)
    versions = [dataclasses.replace(each, versions=(("torch", "2.13.0"),)) for each in (first, *others)]
    versions[-1] = dataclasses.replace(others[-1], host="another", versions=(("torch", "2.0.1"),))
    monkeypatch.setattr(fleet, "start", lambda: versions)
    with pytest.raises(ConfigError, match=r"instance 2 on host another has torch 2\.0\.1, and instance 0 on .* 2\.13"):
        events_of(plan, fleet)


def instructions(plan: Plan) -> int:
    """Count the bytecode instructions that the coordinator and its callees execute for a run."""
    counted = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal counted
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counted += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        events_of(plan, ScriptedFleet(plan))
    finally:
        sys.settrace(before)
    return counted


def test_the_work_per_update_grows_no_faster_than_the_instances(make: Make) -> None:
    few, many = (instructions(plan_of(make, instances)) for instances in (16, 128))
    assert few < many <= 8 * few


class Warns(ScriptedFleet):
    """Every call warns of the same, and the evaluation of something else."""

    def reports(self, update: int) -> List[CallReport]:
        first, *others = super().reports(update)
        return [dataclasses.replace(first, warnings=("UserWarning: the sizes differ",)), *others]

    def call(self, method: str, *arguments: Any) -> List[Any]:
        first, *others = super().call(method, *arguments)
        warnings = ("in the evaluation", "UserWarning: the sizes differ")
        return [dataclasses.replace(first, warnings=warnings) if method == "evaluate" else first, *others]


def test_each_warning_is_an_event_once(make: Make) -> None:
    plan = make(training={"epochs": 2})
    warned = of(events_of(plan, Warns(plan)), InstanceWarned)
    texts = ("UserWarning: the sizes differ", "in the evaluation")
    assert warned == [InstanceWarned(0, text, plan.log_file(0)) for text in texts]


def test_the_user_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "raypod"):
        Reporter().on_event(InstanceWarned(0, "UserWarning: x", "logs/instance-0.log"))
    assert caplog.messages == ["UserWarning: x (instance 0; its log: logs/instance-0.log)"]


class LoadsSlowly(ScriptedFleet):
    """Polls for a stop several times before the first call of a segment, which takes longer than the interval."""

    now_s, segments = 100.0, 0

    def run(self, segment: Segment, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        self.segments += 1
        assert self.segments < 50, "the run makes no progress"
        for _ in range(3):
            self.now_s += 30
            if stop_requested():
                return
        for report in super().run(segment, stop_requested):
            yield report
            self.now_s += 10


@pytest.mark.parametrize("resumed_at", [None, 2])
def test_data_that_loads_slower_than_the_checkpoint_interval_is_trained_on(
    make: Make, resumed_at: Optional[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make(training={"updates": 6}, pod={"num_instances": 2}, run={"checkpoint_every": "1 minute"})
    resumed: Optional[Checkpoint] = None
    if resumed_at is not None:
        checkpoints = checkpoints_folder(plan.run_dir)
        manifest = dataclasses.replace(manifest_of(plan, resumed_at, 1, "", {}), weights_sha256="0" * 64)
        with new_checkpoint(checkpoints, resumed_at) as partial:
            write_manifest(partial, manifest)
        resumed = Checkpoint(checkpoint_path(checkpoints, resumed_at), manifest)
    fleet = LoadsSlowly(plan)
    monkeypatch.setattr(checkpoint_schedule, "time", SimpleNamespace(monotonic=lambda: fleet.now_s))
    events = events_of(plan, fleet, resumed=resumed)
    assert updates_of(events) == list(range(1 + (resumed_at or 0), 7))
    assert fleet.called.count("save") >= 2
    assert isinstance(events[-1], RunEnded)
