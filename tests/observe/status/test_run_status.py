"""The status of a run, folded from the events of a scripted fleet."""

from __future__ import annotations

import json
import os
import pwd
from typing import Any, Callable, Dict, Iterator, List, Tuple

from raypod import events
from raypod.events import CallReport, HeartbeatReport, HostUsage, InstanceLost, InstanceStarted, PhaseBegun
from raypod.observe.status.run_status import RunStatus, user_name
from raypod.plan.plan import Plan, Segment
from raypod.runs.metrics import MetricsAggregator
from raypod.runtime.coordinator import coordinator
from raypod.runtime.workers.fleet import Beat, FleetBroken
from raypod.runtime.workers.scripted import ScriptedFleet
from raypod.system.files import strict_json

USAGE = HostUsage(0.5, 1, 2, 3, 4, 5, 6)


class LosesOne(ScriptedFleet):
    """Instance 1 is lost in the second call."""

    was_repaired = False

    def run(self, segment: Segment, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        for report in super().run(segment, stop_requested):
            if report.first_update == 1 and not self.was_repaired:
                loss = InstanceLost(1, "h1", "died", "its process died", "in call 2", "a stack", "instance-1.log")
                raise FleetBroken((loss,), "")
            yield report

    def repair(self, lost_instances: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        self.was_repaired = True
        return {0: 1}


def statuses(plan: Plan, fleet: ScriptedFleet) -> List[Tuple[Any, Dict[str, Any]]]:
    """Return each event of a run with the snapshot after it."""
    beat = HeartbeatReport(0, "in call 1", 2.0, 1, 0.5, True, 1.0, USAGE, "last line")
    status = RunStatus(plan, lambda: {0: Beat(beat, 0.0)})
    found: List[Tuple[Any, Dict[str, Any]]] = [(None, status.snapshot())]
    for event in coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0)):
        status.on_event(event)
        found.append((event, json.loads(strict_json(status.snapshot()))))
    return found


def test_a_repaired_run_from_its_start_to_its_end(make: Callable[..., Plan]) -> None:
    plan = make(training={"updates": 4}, pod={"replicas": 4, "num_instances": 2})
    found = statuses(plan, LosesOne(plan))
    assert (found[0][1]["phase"], found[0][1]["update"], found[0][1]["eta_s"]) == ("starting", 0, None)
    phases = [event.phase for event, _ in found if isinstance(event, PhaseBegun)]
    assert phases == ["training", "repairing", "training", "saving", "evaluating", "ending"]
    states = [status["instances"][1]["state"] for _, status in found]
    assert states.index("lost") > states.index("training")
    assert states[-1] == "idle"
    last = found[-1][1]
    assert (last["update"], last["total_updates"], last["restarts"], last["generation"]) == (4, 4, 1, 2)
    assert last["repaired_unix_s"] >= last["started_unix_s"]
    assert (last["checkpoints"]["saved"], last["last_evaluation"]["update"]) == (1, 4)
    assert last["recent_updates"]["update"] == [1, 2, 3, 4]
    shown = [event["event"] for event in last["events"]]
    assert shown == ["run_started", "instance_lost", "repaired", "checkpoint_saved", "evaluation_done", "run_ended"]
    assert last["events"][1]["cause"] == "its process died"
    assert "stack" not in last["events"][1]
    assert "seconds" not in last["events"][0]
    assert last["events"][2]["seconds"] >= 0
    assert last["plan"]["total_updates"] == 4


def test_a_snapshot_has_the_heartbeats_the_usage_of_hosts_and_the_user(make: Any, monkeypatch: Any) -> None:
    plan = make(training={"updates": 2}, pod={"replicas": 4, "num_instances": 2})
    last = statuses(plan, ScriptedFleet(plan))[-1][1]
    first, second = last["instances"]
    assert (first["activity"], first["calls"], first["waits_for_others"]) == ("in call 1", 1, True)
    assert (first["log_line"], second["log_line"]) == ("last line", None)
    assert (second["activity"], second["calls"], second["heartbeat_age_s"]) == (None, 0, None)
    assert (first["replicas"], second["ipus"]) == ([0, 2], [2, 2])
    monkeypatch.delenv("USER", raising=False)
    assert user_name() == pwd.getpwuid(os.getuid()).pw_name
    assert [usage["cpu_share"] for usage in last["hosts"].values()] == [0.5]


def test_an_elastic_run_that_is_rolled_back_shows_nothing_of_the_updates_that_are_repeated(make: Any) -> None:
    status = RunStatus(make(pod={"replicas": 8, "num_instances": 4, "elastic": True}), dict)
    for number in (4, 5, 6):
        status.on_event(events.UpdateDone(number, 1, {"loss": 1.0 * number, "accuracy": 0.0}, 32 * number, 9.0, 2.0))
    status.on_event(events.EvaluationDone(10, {"loss": 1.0}, 6, 1))
    status.on_event(events.Repaired((0,), ("a",), "a checkpoint", 5, 2.0, 1, 2, (), ()))
    found = status.snapshot()
    assert (found["update"], found["metrics"]["loss"], found["last_evaluation"]) == (5, 5.0, None)
    assert found["recent_updates"]["update"] == [4, 5]


def test_a_run_that_changes_its_size_shows_its_new_instances(make: Callable[..., Plan]) -> None:
    plan = make(pod={"replicas": 8, "num_instances": 4})
    status = RunStatus(plan, dict)
    instances = tuple(InstanceStarted(each, host, each, "emulated", "", 1, ()) for each, host in enumerate("abcd"))
    status.on_event(events.RunStarted("emulated", "", 0, 1, (), 1, instances))
    status.on_event(InstanceLost(3, "d", "died", "its process died", "", "", "instance-3.log"))
    status.on_event(events.Resized(5, 4, 2, 8, ("a", "b"), "host d is lost"))
    status.on_event(events.Repaired((0, 1), ("a", "b"), "a checkpoint", 5, 2.0, 1, 2, (), instances[:2]))
    found = status.snapshot()
    assert [(each["host"], each["replicas"], each["ipus"]) for each in found["instances"]] == [
        ("a", [0, 2], [0, 2]),
        ("b", [2, 2], [2, 2]),
    ]
    assert list(found["hosts"]) == ["a", "b"]
    assert [event["event"] for event in found["events"]][-2:] == ["resized", "repaired"]
    assert found["update"] == 5
