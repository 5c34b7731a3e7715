"""`events.jsonl`, its page in the documentation, its texts, the recent events in memory, and files that grow."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import typing
from pathlib import Path
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Set, Tuple

import pytest

from raypod import events
from raypod.errors import ConfigError, InstanceFailed, LeaseLost, Preempted
from raypod.observe.logs.command import _kinds
from raypod.observe.monitor.run_source import event_lines
from raypod.observe.report import timeline
from raypod.observe.status.run_status import RunStatus
from raypod.plan.layout import EVENTS
from raypod.plan.plan import Plan
from raypod.plan.tables import topology_summary
from raypod.runs import event_log, growing_file
from raypod.runs.event_log import EventLog, RecentEvents, event_name, fields_of, restarts_in
from raypod.runs.event_text import ALL, MAIN, RECENT, text_of
from raypod.runs.growing_file import GrowingFile, last_lines, parse_records
from raypod.runs.run_state import INTERRUPTED
from tests.support.documented import DOCS
from tests.support.faulty_disks import FlushedFiles


def lines_of(folder: Path) -> List[Dict[str, Any]]:
    return [json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]


def fail(log: EventLog, error: BaseException, *before: Any) -> None:
    for event in before:
        log.on_event(event)
    raise error


def test_events_but_updates_and_calls_are_lines_and_a_truncated_line_stays_separate(tmp_path: Path) -> None:
    (tmp_path / EVENTS).write_text('{"unix_s": 1, "eve')
    with EventLog(tmp_path, {"total_updates": 4}) as log:
        log.on_event(events.PhaseBegun("training", 0))
        log.on_event(events.UpdateDone(1, 1, {"loss": 1.0}, 1, 1.0, 1.0))
        log.on_event(events.CallDone(0, ()))
        log.on_event(events.EvaluationDone(2, {"loss": float("nan")}, 1, 1))
    broken, *lines = (tmp_path / EVENTS).read_text().splitlines()
    assert broken == '{"unix_s": 1, "eve'
    first, phase, evaluation = map(json.loads, lines)
    assert (first["event"], first["total_updates"]) == ("process_started", 4)
    assert {**phase, "unix_s": 0} == {"unix_s": 0, "event": "phase_begun", "phase": "training", "update": 0}
    assert (evaluation["event"], evaluation["metrics"]) == ("evaluation_done", {"loss": None})


def test_a_loss_of_power_keeps_the_time_before_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = FlushedFiles(monkeypatch)
    with EventLog(tmp_path, {}) as log:
        log.on_event(events.PhaseBegun("training", 0))
        log.on_event(events.CheckpointBegun(1))
        assert len(lines_of(tmp_path)) == 3
        assert (tmp_path / EVENTS).stat().st_size == flushed.size_of(tmp_path / EVENTS)
    monkeypatch.setattr(event_log, "_SYNC_INTERVAL_S", -1.0)
    with EventLog(tmp_path, {}) as log:
        log.on_event(events.PhaseBegun("training", 0))
        assert (tmp_path / EVENTS).stat().st_size == flushed.size_of(tmp_path / EVENTS)


def test_pairs_become_objects_at_any_depth() -> None:
    started = events.InstanceStarted(0, "a", 1, "emulated", "", 1, (("load data", 2.0),), "", (("torch", "2"),))
    fields = fields_of(events.RunStarted("emulated", "", 0, 1, (("meet", 1.0),), 1, (started,)))
    assert (fields["seconds"], fields["instances"][0]["seconds"]) == ({"meet": 1.0}, {"load data": 2.0})
    assert (fields["instances"][0]["versions"], event_name(events.RunStarted)) == ({"torch": "2"}, "run_started")


def test_a_failure_and_an_interruption_are_the_last_line_but_not_a_lost_folder(tmp_path: Path) -> None:
    lost = LeaseLost(str(tmp_path), "pid 1 on host b")
    for error in (InstanceFailed(1, "a", "it broke", "log"), KeyboardInterrupt(), lost):
        with pytest.raises(type(error)), EventLog(tmp_path, {}) as log:
            fail(log, error)
    lines = lines_of(tmp_path)
    kinds = ["started", "failed", "started", INTERRUPTED, "started"]
    assert [line["event"] for line in lines] == [f"process_{kind}" for kind in kinds]
    assert lines[1]["exit_code"] == 1
    assert "it broke" in lines[1]["message"]


def test_repairs_are_counted_over_all_starts(tmp_path: Path) -> None:
    assert restarts_in(tmp_path) == 0
    for restarts in ((1, 2, 2), (), (1,)):  # the third one of the first start moved instances away from a drained host
        with EventLog(tmp_path, {}) as log:
            for number in restarts:
                log.on_event(events.Repaired((0,), ("a",), "instance 1", 4, 0.1, number, 2))
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"unix_s": 1, "event": "repaired", "rest')
    assert restarts_in(tmp_path) == 3


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


def test_every_event_of_a_run_has_its_fields_and_an_example() -> None:
    found = documented()
    logged = [each for each in typing.get_args(events.Event) if each not in (events.UpdateDone, events.CallDone)]
    of_run = {name: tables[0] for name, tables in found.items() if not re.match("process_|call_times", name)}
    assert of_run == {event_name(each): fields(each) - {"details"} for each in logged}  # those are in `test.json`
    assert found["run_started"][1] == fields(events.InstanceStarted)
    logged_types = set(typing.get_args(events.Event)) - {events.UpdateDone, events.CallDone}
    assert {type(event) for event, _ in EXAMPLES} == logged_types
    process = {"process_started", "process_failed", "process_interrupted", "process_preempted", "call_times"}
    assert process | {event_name(each) for each in logged_types} == ALL
    assert MAIN < ALL & RECENT


def test_the_lines_of_the_process_and_of_the_calls_have_their_fields(tmp_path: Path, make: Callable[..., Plan]) -> None:
    plan, found = make(), documented()
    instances = tuple(events.InstanceStarted(each, "a", 1, "emulated", "", 1, ()) for each in range(2))
    times = events.CallDone(0, (), tuple(events.CallTimes(each, 1.0, 0.0, 0.5) for each in range(2)))
    counts = {"total_updates": 4, **topology_summary(plan)}
    for error in (InstanceFailed(1, "a", "it broke", "log"), KeyboardInterrupt(), Preempted("preempted", 85)):
        with pytest.raises(type(error)), EventLog(tmp_path, counts) as log:
            fail(log, error, events.RunStarted("emulated", "", 0, 1, (), 1, instances), times, times)
    lines = lines_of(tmp_path)
    written = {line["event"]: set(line) - {"unix_s", "event"} for line in lines}
    for kind in ("process_started", "process_failed", "process_interrupted", "process_preempted", "call_times"):
        assert found[kind][0] - {"raypod"} == written[kind] - {"raypod"}
    calls = next(line for line in lines if line["event"] == "call_times")
    assert [set(each) for each in calls["instances"]] == [found["call_times"][1]] * 2


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
        "interrupted (drained) after update 12, weights " + "b" * 12,
    ),
)


def logged(folder: Path, *run: events.Event, error: Optional[InstanceFailed] = None) -> List[Dict[str, Any]]:
    counts = {"total_updates": 16, "hosts": 1, "instances": 2}
    with contextlib.suppress(InstanceFailed), EventLog(folder, counts) as log:
        fail(log, error, *run) if error else [log.on_event(event) for event in run]
    return parse_records((folder / EVENTS).read_bytes().splitlines())


@pytest.mark.parametrize(("event", "expected"), EXAMPLES, ids=[type(event).__name__ for event, _ in EXAMPLES])
def test_texts_and_views_of_events(
    event: events.Event, expected: str, tmp_path: Path, make: Callable[..., Plan]
) -> None:
    record, *_ = [each for each in logged(tmp_path, event) if each["event"] == event_name(type(event))]
    assert text_of(record) == f"{event_name(type(event)).replace('_', ' ')}: {expected}"
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


def test_the_lines_of_the_process_and_of_the_calls_have_a_text(tmp_path: Path) -> None:
    calls = events.CallDone(0, (), tuple(events.CallTimes(each, 0.02, 0.0, None) for each in range(2)))
    error = InstanceFailed(1, "host-1", "it\nbroke", "the log")
    run = logged(tmp_path, events.RunStarted("emulated", "", 0, 1, (), 1, INSTANCES), calls, calls, error=error)
    texts = [text_of(each) for each in run]
    assert "updates 16, hosts 1, instances 2" in texts[0]
    times = [f"instance {index} 20.0 ms (busy 1.00 of the median)" for index in range(2)]
    assert texts[2] == f"call times: 2 calls from update 0; {', '.join(times)}"
    assert texts[3] == "process failed: exit code 1: instance 1 on host host-1 failed: it broke; its log: the log"


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
    ("text", "kinds"),
    [("none", set()), ("main", MAIN), ("all", ALL), ("repaired, run_ended", {"repaired", "run_ended"})],
)
def test_kinds_are_named(text: str, kinds: FrozenSet[str]) -> None:
    assert _kinds(text) == kinds
    with pytest.raises(ConfigError, match="--events repaired,update: 'update' is no kind of event; known: none, main"):
        _kinds("repaired,update")


def test_only_complete_new_lines_are_returned_and_a_replaced_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    growing = GrowingFile(path)
    assert growing.read() == ([], False)
    path.write_bytes(b"one\ntw")
    assert growing.read() == ([b"one"], False)
    assert growing.read() == ([], False)
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert growing.read() == ([b"two", b"three"], False)
    (tmp_path / "new").write_bytes(b"1\n2\n3\n4\n5\n6\n7\n8\n")
    (tmp_path / "new").replace(path)
    assert growing.read() == ([b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8"], True)
    path.write_bytes(b"x\n")
    assert growing.read() == ([b"x"], True)


def test_records_skip_damaged_lines_and_a_read_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b'{"a": 1}\n[2]\n{"a": \n{"a": null}\n')
    first, second = GrowingFile(path).read_records().records
    assert first == {"a": 1}
    assert math.isnan(second["a"])
    path.write_bytes(b"a\nb\r c\n" + b"x" * 9 + b"\nend")
    growing = GrowingFile(path, max_bytes=8)
    assert [growing.read().lines for _ in range(4)] == [[b"a", b"b\r c"], [b"x" * 8], [b"x"], []]
    assert growing.read_rest() == b"end"


@pytest.mark.parametrize("content", [b"", b"a", b"\n", b"\n\na", b"one\ntwo\n", b"one\n\nthree", b"long line\nx\n" * 9])
@pytest.mark.parametrize("tail_bytes", [1, 3, 64])
def test_lines_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, tail_bytes: int) -> None:
    monkeypatch.setattr(growing_file, "_TAIL_BYTES", tail_bytes)
    path = tmp_path / "lines"
    assert list(last_lines(path)) == []
    path.write_bytes(content)
    found = list(last_lines(path))
    assert [line.text for line in reversed(found)] == content.splitlines(keepends=True)
    assert all(content[: line.end].endswith(line.text) for line in found)


def test_last_lines_read_only_the_end_of_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with path.open("wb") as file:
        file.truncate(1 << 36)  # a hole of 64 GiB
        file.seek(0, 2)
        file.write(b"\nfirst\nlast\n")
    lines = last_lines(path)
    assert [next(lines).text, next(lines).text] == [b"last\n", b"first\n"]
