from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List

import pytest

from raypod.errors import InstanceFailed, LeaseLost
from raypod.events import CallDone, EvaluationDone, InstanceStarted, PhaseBegun, Repaired, RunStarted, UpdateDone
from raypod.record.event_log import NAME, EventLog, event_name, fields_of, restarts_in
from raypod.record.run_state import INTERRUPTED


def lines_of(folder: Path) -> List[Dict[str, Any]]:
    return [json.loads(line) for line in (folder / NAME).read_text().splitlines()]


def test_every_event_but_updates_and_calls_is_a_line(tmp_path: Path) -> None:
    with EventLog(tmp_path, {"total_updates": 4}) as log:
        log.handle(PhaseBegun("training", 0))
        log.handle(UpdateDone(1, 1, {"loss": 1.0}, 1, 1.0, 1.0))
        log.handle(CallDone(0, ()))
        log.handle(EvaluationDone(2, {"loss": float("nan")}, 1, 1))
    first, phase, evaluation = lines_of(tmp_path)
    assert (first["event"], first["total_updates"]) == ("process_started", 4)
    assert {**phase, "unix_s": 0} == {"unix_s": 0, "event": "phase_begun", "phase": "training", "update": 0}
    assert (evaluation["event"], evaluation["metrics"]) == ("evaluation_done", {"loss": None})


def test_pairs_become_objects_at_any_depth() -> None:
    started = InstanceStarted(0, "a", 1, "emulated", "", 1, (("load data", 2.0),), "", (("torch", "2"),))
    fields = fields_of(RunStarted("emulated", "", 0, 1, (("meet", 1.0),), 1, (started,)))
    assert fields["seconds"] == {"meet": 1.0}
    assert fields["instances"][0]["seconds"] == {"load data": 2.0}
    assert fields["instances"][0]["versions"] == {"torch": "2"}
    assert event_name(RunStarted) == "run_started"


def test_a_failure_and_an_interruption_are_the_last_line(tmp_path: Path) -> None:
    with pytest.raises(InstanceFailed), EventLog(tmp_path, {}):
        raise InstanceFailed(1, "a", "it broke", "log")
    with pytest.raises(KeyboardInterrupt), EventLog(tmp_path, {}):
        raise KeyboardInterrupt
    assert [line["event"] for line in lines_of(tmp_path)] == [
        *("process_started", "process_failed", "process_started", f"process_{INTERRUPTED}")
    ]
    assert lines_of(tmp_path)[1]["exit_code"] == 1
    assert "it broke" in lines_of(tmp_path)[1]["message"]


def test_repairs_are_counted_over_all_starts(tmp_path: Path) -> None:
    assert restarts_in(tmp_path) == 0
    for restarts in ((1, 2, 2), (), (1,)):  # the third one of the first start moved instances away from a drained host
        with EventLog(tmp_path, {}) as log:
            for number in restarts:
                log.handle(Repaired((0,), ("a",), "instance 1", 4, 0.1, number, 2))
    with (tmp_path / NAME).open("a") as file:
        file.write('{"unix_s": 1, "event": "repaired", "rest')
    assert restarts_in(tmp_path) == 3


def test_a_process_that_lost_the_folder_writes_no_end(tmp_path: Path) -> None:
    with pytest.raises(LeaseLost), EventLog(tmp_path, {}):
        raise LeaseLost(str(tmp_path), "pid 1 on host b")
    assert [line["event"] for line in lines_of(tmp_path)] == ["process_started"]


def test_a_truncated_line_stays_separate(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"unix_s": 1, "eve')
    with EventLog(tmp_path, {}):
        pass
    broken, started = (tmp_path / NAME).read_text().splitlines()
    assert broken == '{"unix_s": 1, "eve'
    assert json.loads(started)["event"] == "process_started"
