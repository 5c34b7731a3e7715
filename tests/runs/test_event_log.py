"""`events.jsonl`, its page in the documentation, and the recent events in memory."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from pathlib import Path
from typing import Any, Callable, Dict, List, Set

import pytest

from raypod import events
from raypod.errors import InstanceFailed, LeaseLost, Preempted
from raypod.events import (
    CallDone,
    CallTimes,
    CheckpointBegun,
    EvaluationDone,
    InstanceStarted,
    PhaseBegun,
    Repaired,
    RunStarted,
    UpdateDone,
)
from raypod.plan.layout import EVENTS
from raypod.plan.plan import Plan
from raypod.plan.tables import topology_summary
from raypod.runs import event_log
from raypod.runs.event_log import EventLog, RecentEvents, event_name, fields_of, restarts_in
from raypod.runs.run_state import INTERRUPTED
from tests.support.documented import DOCS
from tests.support.faulty_disks import FlushedFiles


def lines_of(folder: Path) -> List[Dict[str, Any]]:
    return [json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]


def fail(log: EventLog, error: BaseException, *before: Any) -> None:
    for event in before:
        log.on_event(event)
    raise error


def test_every_event_but_updates_and_calls_is_a_line(tmp_path: Path) -> None:
    with EventLog(tmp_path, {"total_updates": 4}) as log:
        log.on_event(PhaseBegun("training", 0))
        log.on_event(UpdateDone(1, 1, {"loss": 1.0}, 1, 1.0, 1.0))
        log.on_event(CallDone(0, ()))
        log.on_event(EvaluationDone(2, {"loss": float("nan")}, 1, 1))
    first, phase, evaluation = lines_of(tmp_path)
    assert (first["event"], first["total_updates"]) == ("process_started", 4)
    assert {**phase, "unix_s": 0} == {"unix_s": 0, "event": "phase_begun", "phase": "training", "update": 0}
    assert (evaluation["event"], evaluation["metrics"]) == ("evaluation_done", {"loss": None})


def test_a_loss_of_power_keeps_what_happened_before_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = FlushedFiles(monkeypatch)
    with EventLog(tmp_path, {}) as log:
        log.on_event(PhaseBegun("training", 0))
        log.on_event(CheckpointBegun(1))
        assert len(lines_of(tmp_path)) == 3
        assert (tmp_path / EVENTS).stat().st_size == flushed.size_of(tmp_path / EVENTS)
    monkeypatch.setattr(event_log, "_SYNC_INTERVAL_S", -1.0)
    with EventLog(tmp_path, {}) as log:
        log.on_event(PhaseBegun("training", 0))
        assert (tmp_path / EVENTS).stat().st_size == flushed.size_of(tmp_path / EVENTS)


def test_pairs_become_objects_at_any_depth() -> None:
    started = InstanceStarted(0, "a", 1, "emulated", "", 1, (("load data", 2.0),), "", (("torch", "2"),))
    fields = fields_of(RunStarted("emulated", "", 0, 1, (("meet", 1.0),), 1, (started,)))
    assert fields["seconds"] == {"meet": 1.0}
    assert fields["instances"][0]["seconds"] == {"load data": 2.0}
    assert fields["instances"][0]["versions"] == {"torch": "2"}
    assert event_name(RunStarted) == "run_started"


def test_a_failure_and_an_interruption_are_the_last_line_but_not_a_lost_folder(tmp_path: Path) -> None:
    lost = LeaseLost(str(tmp_path), "pid 1 on host b")
    for error in (InstanceFailed(1, "a", "it broke", "log"), KeyboardInterrupt(), lost):
        with pytest.raises(type(error)), EventLog(tmp_path, {}) as log:
            fail(log, error)
    lines = lines_of(tmp_path)
    assert [line["event"] for line in lines] == [
        *("process_started", "process_failed", "process_started", f"process_{INTERRUPTED}", "process_started")
    ]
    assert lines[1]["exit_code"] == 1
    assert "it broke" in lines[1]["message"]


def test_repairs_are_counted_over_all_starts(tmp_path: Path) -> None:
    assert restarts_in(tmp_path) == 0
    for restarts in ((1, 2, 2), (), (1,)):  # the third one of the first start moved instances away from a drained host
        with EventLog(tmp_path, {}) as log:
            for number in restarts:
                log.on_event(Repaired((0,), ("a",), "instance 1", 4, 0.1, number, 2))
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"unix_s": 1, "event": "repaired", "rest')
    assert restarts_in(tmp_path) == 3


def test_a_truncated_line_stays_separate(tmp_path: Path) -> None:
    (tmp_path / EVENTS).write_text('{"unix_s": 1, "eve')
    with EventLog(tmp_path, {}):
        pass
    broken, started = (tmp_path / EVENTS).read_text().splitlines()
    assert broken == '{"unix_s": 1, "eve'
    assert json.loads(started)["event"] == "process_started"


def test_many_epochs_and_checkpoints_do_not_displace_a_repair() -> None:
    recent = RecentEvents(3)
    recent.append({"event": "run_started", "first_update": 0})
    for epoch in range(5):
        recent.append({"event": "epoch_done", "epoch": epoch})
        if epoch == 3:
            recent.append({"event": "repaired", "update": 7})
    kept = [(each["event"], each.get("epoch")) for each in recent.records()]
    epochs = [("epoch_done", 2), ("epoch_done", 3), ("repaired", None), ("epoch_done", 4)]
    assert kept == [("run_started", None), *epochs]
    for update in range(4):
        recent.append({"event": "repaired", "update": update})
    repairs = [each["update"] for each in recent.records() if each["event"] == "repaired"]
    assert repairs == [1, 2, 3]  # the newest


# ---- docs/reference/events.md describes every event and every field --------------------------------------------------


def documented() -> Dict[str, List[Set[str]]]:
    """Return the fields of the tables of each event."""
    found: Dict[str, List[Set[str]]] = {}
    for part in (DOCS / "reference/events.md").read_text().split("\n## ")[1:]:
        name = part.partition("\n")[0].strip("`")
        tables = re.findall(r"\|---\|---\|\n((?:\|.*\n?)+)", part)
        found[name] = [
            {field for row in table.splitlines() for field in re.findall(r"`(\w+)`", row.split("|")[1])}
            for table in tables
        ]
    return found


def fields(event_type: type) -> Set[str]:
    return {field.name for field in dataclasses.fields(event_type)}


def test_every_event_of_a_run_has_its_fields() -> None:
    found = documented()
    logged = [each for each in typing.get_args(events.Event) if each not in (UpdateDone, CallDone)]
    assert {name: tables[0] for name, tables in found.items() if not re.match("process_|call_times", name)} == {
        event_name(each): fields(each) - {"details"}
        for each in logged  # those are in `test.json`
    }
    assert found["run_started"][1] == fields(InstanceStarted)


def test_the_lines_of_the_process_and_of_the_calls_have_their_fields(tmp_path: Path, make: Callable[..., Plan]) -> None:
    plan, found = make(), documented()
    instances = tuple(InstanceStarted(each, "a", 1, "emulated", "", 1, ()) for each in range(2))
    times = CallDone(0, (), tuple(CallTimes(each, 1.0, 0.0, 0.5) for each in range(2)))
    counts = {"total_updates": 4, **topology_summary(plan)}
    for error in (InstanceFailed(1, "a", "it broke", "log"), KeyboardInterrupt(), Preempted("preempted", 85)):
        with pytest.raises(type(error)), EventLog(tmp_path, counts) as log:
            fail(log, error, RunStarted("emulated", "", 0, 1, (), 1, instances), times, times)
    lines = lines_of(tmp_path)
    written = {line["event"]: set(line) - {"unix_s", "event"} for line in lines}
    for kind in ("process_started", "process_failed", "process_interrupted", "process_preempted", "call_times"):
        assert found[kind][0] - {"raypod"} == written[kind] - {"raypod"}
    calls = next(line for line in lines if line["event"] == "call_times")
    assert [set(each) for each in calls["instances"]] == [found["call_times"][1]] * 2
