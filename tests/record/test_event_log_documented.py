"""docs/reference/events.md describes every event and every field of `events.jsonl`."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from pathlib import Path
from typing import Dict, List, Set

import pytest
from documented import DOCS

from raypod import events
from raypod.errors import InstanceFailed, Preempted
from raypod.events import CallDone, CallTimes, InstanceStarted, RunStarted, UpdateDone
from raypod.plan.tables import topology_summary
from raypod.record.event_log import NAME, EventLog, event_name


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


def fail(log: EventLog, run: List[events.Event], error: BaseException) -> None:
    for event in run:
        log.handle(event)
    raise error


def test_every_event_of_a_run_has_its_fields() -> None:
    found = documented()
    logged = [each for each in typing.get_args(events.Event) if each not in (UpdateDone, CallDone)]
    assert {name: tables[0] for name, tables in found.items() if not re.match("process_|call_times", name)} == {
        event_name(each): fields(each) for each in logged
    }
    assert found["run_started"][1] == fields(InstanceStarted)


def test_the_lines_of_the_process_and_of_the_calls_have_their_fields(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    plan, found = make(), documented()
    instances = tuple(InstanceStarted(each, "a", 1, "emulated", "", 1, ()) for each in range(2))
    times = CallDone(0, (), tuple(CallTimes(each, 1.0, 0.0, 0.5) for each in range(2)))
    counts = {"total_updates": 4, **topology_summary(plan)}
    for error in (InstanceFailed(1, "a", "it broke", "log"), KeyboardInterrupt(), Preempted("preempted", 85)):
        with pytest.raises(type(error)), EventLog(tmp_path, counts) as log:
            fail(log, [RunStarted("emulated", "", 0, 1, (), 1, instances), times, times], error)
    lines = [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()]
    written = {line["event"]: set(line) - {"unix_s", "event"} for line in lines}
    for kind in ("process_started", "process_failed", "process_interrupted", "process_preempted", "call_times"):
        assert found[kind][0] - {"raypod"} == written[kind] - {"raypod"}
    calls = next(line for line in lines if line["event"] == "call_times")
    assert [set(each) for each in calls["instances"]] == [found["call_times"][1]] * 2
