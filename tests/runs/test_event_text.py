from __future__ import annotations

import contextlib
import json
import re
import typing
from pathlib import Path
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Tuple

import pytest

from raypod import events
from raypod.errors import ConfigError, InstanceFailed
from raypod.observe.logs.command import _kinds
from raypod.observe.monitor.run_source import event_lines
from raypod.observe.report import timeline
from raypod.observe.status.run_status import RunStatus
from raypod.plan.layout import EVENTS
from raypod.plan.plan import Plan
from raypod.runs.event_log import EventLog, event_name
from raypod.runs.event_text import ALL, MAIN, RECENT, text_of
from raypod.runs.growing_file import parse_records

INSTANCES = tuple(
    events.InstanceStarted(index, f"host-{index}", 7, "emulated", "", 1, (("load data", 2.0),), "", ())
    for index in range(2)
)
EXAMPLES: Tuple[Tuple[events.Event, str], ...] = (
    (
        events.RunStarted("emulated", "emulated SDK", 4, 1, (("join", 1.5), ("build", 1.0)), 2, INSTANCES),
        "2 instances on host-0, host-1 after 2.5 s; generation 2, from update 4; emulated SDK",
    ),
    (events.PhaseBegun("saving", 5), "saving after update 5"),
    (events.EpochDone(3, {"loss": 0.25, "accuracy": float("nan")}), "epoch 3: loss 0.25, accuracy nan"),
    (events.CheckpointBegun(6), "after update 6"),
    (events.CheckpointSaved(6, "/c/update-6", "a" * 64), "/c/update-6 after update 6, weights aaaaaaaaaaaa"),
    (events.CheckpointFailed(6, "/c/6", "disk full", "/c/5"), "/c/6 after update 6: disk full; /c/5 still exists"),
    (events.EvaluationDone(360, {"loss": 0.5}, 8, 1), "loss 0.5 after update 8 on 360 samples"),
    (
        events.InstanceLost(1, "host-1", "died", "signal 9\nkilled", "train", "stack", "log"),
        "instance 1 on host-1 died (last heartbeat: train): signal 9 killed",
    ),
    (events.InstanceWarned(0, "UserWarning: x (a.py:3)", "log"), "instance 0: UserWarning: x (a.py:3)"),
    (
        events.Repaired((1,), ("host-2",), "instance 0", 9, 3.21, 1, 2, (), INSTANCES),
        "instance 1 on host-2, from instance 0; continues after update 9, 3.2 s; restarts 1, generation 2",
    ),
    (
        events.Resized(9, 1, 4, 4, ("host-0",), "host-1 is lost"),
        "1 replica x accumulation 4 after update 9, instead of 4 replicas: host-1 is lost",
    ),
    (events.StoppedEarly(12, "loss", 3, 9, 0.5), "after update 12: loss was best after update 9"),
    (
        events.RunEnded(12, True, "b" * 64, None, "drained"),
        "interrupted (drained) after update 12, weights bbbbbbbbbbbb",
    ),
)


def logged(folder: Path, *run: events.Event, error: Optional[InstanceFailed] = None) -> List[Dict[str, Any]]:
    with contextlib.suppress(InstanceFailed), EventLog(
        folder, {"total_updates": 16, "hosts": 1, "instances": 2}
    ) as log:
        for event in run:
            log.on_event(event)
        if error is not None:
            raise error
    return parse_records((folder / EVENTS).read_bytes().splitlines())


@pytest.mark.parametrize(("event", "expected"), EXAMPLES, ids=[type(event).__name__ for event, _ in EXAMPLES])
def test_each_event_has_a_text(tmp_path: Path, event: events.Event, expected: str) -> None:
    text = text_of(logged(tmp_path, event)[1])
    assert text == f"{event_name(type(event)).replace('_', ' ')}: {expected}"


def test_the_lines_of_the_process_and_of_the_calls_have_a_text(tmp_path: Path) -> None:
    calls = events.CallDone(0, (), tuple(events.CallTimes(each, 0.02, 0.0, None) for each in range(2)))
    error = InstanceFailed(1, "host-1", "it\nbroke", "the log")
    run = logged(tmp_path, events.RunStarted("emulated", "", 0, 1, (), 1, INSTANCES), calls, calls, error=error)
    texts = [text_of(each) for each in run]
    assert "updates 16, hosts 1, instances 2" in texts[0]
    assert texts[2] == (
        "call times: 2 calls from update 0; instance 0 20.0 ms (busy 1.00 of the median), "
        "instance 1 20.0 ms (busy 1.00 of the median)"
    )
    assert texts[3] == "process failed: exit code 1: instance 1 on host host-1 failed: it broke; its log: the log"


def test_every_event_of_a_run_is_known_and_has_an_example() -> None:
    logged_types = set(typing.get_args(events.Event)) - {events.UpdateDone, events.CallDone}
    assert {type(event) for event, _ in EXAMPLES} == logged_types
    process = {"process_started", "process_failed", "process_interrupted", "process_preempted", "call_times"}
    assert process | {event_name(each) for each in logged_types} == ALL
    assert MAIN < ALL & RECENT


@pytest.mark.parametrize(("event", "_"), EXAMPLES)
def test_every_view_shows_every_main_event(
    event: events.Event, _: str, tmp_path: Path, make: Callable[..., Plan]
) -> None:
    (record,) = [each for each in logged(tmp_path, event) if each["event"] == event_name(type(event))]
    if record["event"] not in MAIN:
        return
    assert event_lines([record])[0].text == text_of(record)
    status = RunStatus(make(), dict)
    status.on_event(event)
    assert [each["event"] for each in status.snapshot()["events"]] == [record["event"]]
    folded = timeline.Timeline()
    folded.handle(record)
    data = folded.data()
    assert data["counts"] or data["generations"][-1]["ready_s"] is not None, "the report does not show it"
    script = Path(timeline.__file__).with_name("assets") / "timeline.js"
    assert set(data["counts"]) <= set(re.findall(r"^  (\w+): \{ name", script.read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    "fields",
    [
        '"event": "repaired"',
        '"event": "run_started", "unix_s": "soon", "instances": 3',
        '"unix_s": 1, "event": 4',
        '"unix_s": 1e308, "event": "run_ended"',
        f'"unix_s": 1{400 * "0"}, "event": []',
        f'"unix_s": 1, "event": "run_started", "instances": [], "seconds": {{"join": 1{400 * "0"}}}',
    ],
)
def test_an_event_of_another_version_is_still_a_line(fields: str) -> None:
    text = text_of(json.loads(f"{{{fields}}}"))
    assert text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("text", "kinds"), [("none", frozenset()), ("main", MAIN), ("all", ALL), ("repaired, run_ended", None)]
)
def test_kinds_are_named(text: str, kinds: FrozenSet[str]) -> None:
    assert _kinds(text) == (frozenset({"repaired", "run_ended"}) if kinds is None else kinds)


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--events repaired,update: 'update' is no kind of event; known: none, main"):
        _kinds("repaired,update")
