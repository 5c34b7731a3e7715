"""The data of a report: rows, timeline and calls of a run; `raypod compare` and its results."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import shlex
import socket
from pathlib import Path
from typing import Any, List

import pytest

from raypod.__main__ import main
from raypod.errors import ConfigError
from raypod.observe.dashboard.command import RunsFolder
from raypod.observe.report import compare
from raypod.observe.report.curves import MAX_ROWS, Row, decimate
from raypod.observe.report.run_data import RunReader, differing_settings, results_of
from raypod.observe.report.timeline import CallWindows, Starts, Timeline
from raypod.runs import lease
from raypod.runs.upload import remote_run
from raypod.system.files import strict_json
from tests.support.run_folders import call_times, event, update_record, write_lines, write_run


def rows_of(count: int, seed: int = 1) -> List[Row]:
    rng = random.Random(seed)
    return [[update, 8.0 * update, 0.1 * update, rng.gauss(0, 1), rng.random()] for update in range(1, count + 1)]


def check_extremes(kept: List[Row], rows: List[Row]) -> None:
    for column in (3, 4):
        for choose in (min, max):
            assert choose(row[column] for row in kept) == choose(row[column] for row in rows)


@pytest.mark.parametrize("count", [5, 100, 999, 20_000])
def test_decimation_keeps_extremes_and_both_ends(count: int) -> None:
    rows = rows_of(count)
    kept = decimate(rows, 400)
    assert len(kept) <= 400 or count <= 400
    assert [row[0] for row in kept] == sorted({row[0] for row in kept})
    assert all(row in rows[int(row[0]) - 1 : int(row[0])] for row in kept)
    assert (kept[0], kept[-1]) == (rows[0], rows[-1])
    check_extremes(kept, rows)


def test_decimation_in_steps_keeps_the_extremes_short_peaks_and_missing_values() -> None:
    rows = rows_of(30_000)
    kept: List[Row] = []
    for begin in range(0, len(rows), 1000):
        kept = decimate(kept + rows[begin : begin + 1000], 500)
    check_extremes(kept, rows)
    rows: List[Row] = [[update, update, update, 1.0] for update in range(1, 10_001)]
    for update in range(500, 10_000, 1000):
        rows[update][3] = 9.0
    assert sum(row[3] == 9.0 for row in decimate(rows, 300)) == 10
    rows = rows_of(5000)
    rows[2345][3] = math.nan
    assert rows[2345] in decimate(rows, 200)


def read(folder: Path) -> RunReader:
    reader = RunReader(folder)
    assert reader.refresh()
    return reader


def test_a_run_has_every_point_and_its_timeline(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run")
    data = read(tmp_path / "run").data()
    assert data["curves"]["columns"][:5] == ["update", "samples", "time_s", "loss", "accuracy"]
    assert [(row[0], row[3]) for row in data["curves"]["rows"]] == [(line["update"], line["loss"]) for line in lines]
    assert (data["curves"]["updates"], data["curves"]["decimated"]) == (60, False)
    assert [row[0] for row in data["evaluations"]["rows"]] == [20, 40]
    assert (data["state"], data["name"], data["metrics"]) == ("done", "run", ["loss", "accuracy"])
    assert data["config"]["training.learning_rate"] == 0.1
    assert "training.lr_gamma" not in data["config"]
    assert data["versions"]["torch"] == {"2.13.0": [0, 1]}
    pipeline = data["plan"]["pipeline"]
    assert (pipeline["stages"], pipeline["ipus"]) == (["the input", "block2", "head"], [0, 1, 0])
    assert (pipeline["cycles"], json.loads(strict_json(data))) == (8 + 2 * 3 - 2 + 1, data)
    timeline = data["timeline"]
    generations = [(each["cause"], each["generation"]) for each in timeline["generations"]]
    assert generations == [("started", 1), ("repaired", 2)]
    assert [(row, phase, begin, end) for row, phase, begin, end, _ in timeline["spans"]] == [
        *((0, "starting", 0.0, 5.0), (0, "training", 5.0, 16.0), (0, "repairing", 16.0, 18.0)),
        (1, "training", 18.0, 28.0),
    ]
    kinds = [mark[0] for mark in timeline["marks"]]
    assert kinds == ["checkpoint_saved", "evaluation_done", "instance_lost", "repaired", "run_ended"]
    assert timeline["marks"][0][-1].endswith(f"20 after update 20, weights {6 * 'ab'}, written in 0.5 s")
    assert timeline["marks"][3][-1].startswith("instance 1 on host-c, from instance 0; continues after update 30")
    assert timeline["phase_s"] == {"starting": 5.0, "training": 21.0, "repairing": 2.0}
    assert data["instances"][1]["lost"] == 1


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run", updates=30)
    reader = read(tmp_path / "run")
    assert not reader.refresh()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(update_record(31, 0.25)) + "\n" + '{"update": 32, "lo')
    assert reader.refresh()
    assert [row[3] for row in reader.data()["curves"]["rows"]] == [*(line["loss"] for line in lines), 0.25]


def test_a_resumed_run_replaces_its_later_updates(tmp_path: Path) -> None:
    write_run(tmp_path / "run", updates=30)
    reader = read(tmp_path / "run")
    kept = [update_record(update, 1.0) for update in range(1, 21)]
    resumed = {**update_record(21, 2.0), "time_s": 3.0}  # the time of a process counts from its start
    (tmp_path / "run" / "metrics.jsonl").unlink()
    write_lines(tmp_path / "run" / "metrics.jsonl", [*kept, resumed])
    assert reader.refresh()
    rows = reader.data()["curves"]["rows"]
    assert [row[0] for row in rows] == list(range(1, 22))
    assert rows[-1][2] == pytest.approx(kept[-1]["time_s"] + 3.0)


def test_the_summary_of_an_earlier_start_is_not_that_of_a_resumed_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, updates=5)
    reader = read(folder)
    assert reader.data()["summary"] is not None
    for name, has_summary in (("process_started", False), ("run_started", False), ("run_ended", True)):
        with (folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(event(100, name)) + "\n")
        assert reader.refresh()
        assert (reader.data()["summary"] is not None) == has_summary


def test_a_missing_value_is_null(tmp_path: Path) -> None:
    write_run(tmp_path / "run", updates=5)
    write_lines(tmp_path / "run" / "metrics.jsonl", [{**update_record(1, 0.0), "loss": None}, update_record(2, 0.5)])
    reader = read(tmp_path / "run")
    assert [row[3] for row in json.loads(strict_json(reader.data()))["curves"]["rows"]] == [None, 0.5]


def test_data_of_a_long_run_is_bounded(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run", updates=30_000)
    reader = read(tmp_path / "run")
    data = reader.data()
    assert len(data["curves"]["rows"]) <= MAX_ROWS
    assert data["curves"]["updates"] == 30_000
    assert max(row[3] for row in data["curves"]["rows"]) == max(line["loss"] for line in lines)
    assert len(reader.data(500)["curves"]["rows"]) <= 500


@pytest.mark.parametrize("name", ["events.jsonl", "state.json", "metrics.jsonl", "plan.json"])
def test_a_folder_with_one_file_of_a_run_is_read(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "whole")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_bytes((tmp_path / "whole" / name).read_bytes())
    assert read(tmp_path / "run").data()["id"] == str(tmp_path / "run")


@pytest.mark.parametrize("content", ["", "[1, 2", '"text"\n{"event": 3}\n{"unix_s": "x"}\n[]\n'])
def test_damaged_files_count_as_missing(tmp_path: Path, content: str) -> None:
    (tmp_path / "run").mkdir()
    for name in ("events.jsonl", "metrics.jsonl", "evaluations.jsonl", "plan.json", "state.json", "config.yaml"):
        (tmp_path / "run" / name).write_text(content)
    reader = RunReader(tmp_path / "run")
    reader.refresh()
    data = reader.data()
    assert (data["state"], data["plan"], data["curves"]["rows"]) == ("unknown", None, [])


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run folder"):
        RunReader(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        RunReader(tmp_path / "missing")


def test_a_run_whose_coordinator_died_elsewhere_has_died_in_the_dashboard(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "run"
    write_run(folder)
    state = {"pid": 1, "started_ticks": 0, "host": "elsewhere", "state": "running", "update": 9, "total_updates": 99}
    (folder / "state.json").write_text(json.dumps(state))
    holder = dataclasses.replace(lease.this_process(), host="elsewhere")
    file = folder / "lease-1.json"
    file.write_bytes(holder.content())
    reader, runs = RunReader(folder), RunsFolder(tmp_path)
    reader.refresh()
    assert [reader.data()["state"], *(run["state"] for run in runs.list())] == ["running", "running"]
    file.write_bytes(dataclasses.replace(holder, expires_after_s=0.0).content())
    reader.refresh()
    assert [reader.data()["state"], *(run["state"] for run in runs.list())] == ["died", "died"]
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.1)
    observed, waits = RunReader(folder), []  # type: ignore[var-annotated]
    observed.observe(waits.append)
    observed.refresh()
    assert (observed.data()["state"], len(waits)) == ("died", 1), "known after one look"
    file.unlink()
    monkeypatch.setattr(remote_run, "is_copy", lambda folder: True)
    copy = RunReader(folder)
    copy.refresh()
    assert copy.data()["state"] == "running", "the copy of a run on a store has no lease"


def timeline_of(*events: Any) -> Any:
    timeline = Timeline()
    for each in events:
        timeline.handle(each)
    return timeline.data()


def test_the_pause_between_two_processes_is_left_out_and_sums_of_many_events_are_kept() -> None:
    data = timeline_of(
        event(0, "process_started"),
        event(10, "process_interrupted", message="", exit_code=130),
        event(100_000, "process_started"),
        event(100_005, "run_started", generation=2, first_update=7),
        event(100_009, "run_ended", interrupted=False),
    )
    assert (data["end_s"], data["gaps"]) == (19.0, [[10.0, 99_990.0]])
    assert [each["cause"] for each in data["generations"]] == ["started", "resumed"]
    events = [event(0, "process_started")]
    for number in range(20_000):
        events.append(event(number, "phase_begun", phase=("training", "saving")[number % 2], update=number))
        events.append(event(number + 0.5, "checkpoint_saved", update=number, path=f"update-{number}"))
    data = timeline_of(*events, event(20_000, "run_ended", interrupted=False))
    assert len(data["spans"]) <= 1500
    assert len(data["marks"]) <= 700
    assert data["counts"]["checkpoint_saved"] == 20_000
    assert data["phase_s"] == {"starting": 0.0, "training": 10_000.0, "saving": 10_000.0}


def test_steps_and_windows_of_the_instances_keep_their_order_and_stragglers() -> None:
    starts = Starts()
    seconds = {"start or join Ray": 3.0, "start the instances": 2.0, "meet": 0.1, "in the instances: load data": 1.0}
    starts.handle(event(0, "process_started", raypod="0.1.0"))
    starts.handle(event(6, "run_started", seconds=seconds, generation=1, first_update=0, instances=[]))
    (start,) = starts.starts
    names = ["start or join Ray", "start the instances", "in the instances: load data", "meet"]
    assert ([name for name, _ in start["steps"]], start["total_s"]) == (names, 6.0)
    windows = CallWindows()
    for number in range(5000):
        windows.handle(call_times(10.0 * number, 100 * number, 100, [0.01, 0.01, 0.01, 0.02]), 10.0 * number)
    data = windows.data()
    assert len(data["end_s"]) * 4 <= 9000
    assert sum(data["calls"]) == 500_000
    slow = data["totals"][3]
    assert (slow["busy_ratio"], slow["calls"], slow["slowest_s"]) == (2.0, 500_000, 0.04)
    assert data["totals"][0]["peer_wait_share"] == pytest.approx(0.5)


def test_a_killed_run_has_the_updates_of_its_metrics(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [update_record(update, 1.0) for update in range(1, 31)])
    gone = {"pid": 2**22 + 1, "started_ticks": 1, "host": socket.gethostname(), "state": "running", "update": 20}
    unknown = {"total_updates": 90, "loss": None, "samples_per_s": 0.0, "restarts": 0, "exit_code": None}
    (tmp_path / "state.json").write_text(json.dumps({**gone, **unknown, "message": "", "written_at_s": 0.0}))
    reader = read(tmp_path)
    assert (reader.data()["state"], reader.data()["update"]) == ("died", 30)
    assert not reader.refresh()


def two_runs(folder: Path) -> List[str]:
    for name, rate in (("a", 0.1), ("b", 0.2)):
        write_run(folder / name, updates=3, learning_rate=rate)
        losses = [3.0, 1.0, 2.0] if name == "a" else [3.0, 2.0, 0.5]
        write_lines(folder / name / "metrics.jsonl", [update_record(at, loss) for at, loss in enumerate(losses, 1)])
    tests = [{"samples": 9, "f1": 0.5 - 0.1 * at, "accuracy": 80.0 + at, "update": at, "epoch": 1} for at in (1, 2)]
    write_lines(folder / "b" / "evaluations.jsonl", tests)
    plan = json.loads((folder / "b" / "plan.json").read_text())
    (folder / "b" / "plan.json").write_text(json.dumps({**plan, "metrics": {"f1": "higher"}}))
    return [str(folder / "a"), str(folder / "b")]


@pytest.mark.parametrize("command", ["compare", "report"])
def test_a_folder_of_runs_is_named(command: str, tmp_path: Path, capsys: Any) -> None:
    two_runs(tmp_path)
    assert main([command, str(tmp_path)]) == 2
    assert f"it contains 2 runs: name them, as in {tmp_path}/*" in capsys.readouterr().err


def test_the_table_has_the_settings_that_differ_and_the_results(tmp_path: Path, capsys: Any) -> None:
    assert main(["compare", *two_runs(tmp_path)]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    table = {row[0].strip(): [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    assert (table[""], table["training.learning_rate"]) == (["a", "b"], ["0.1", "0.2"])
    assert "training.execution" not in table
    assert table["training loss, best"] == ["1 (update 2)", "0.5 (update 3)"]
    assert table["training loss, last"] == ["2", "0.5"]
    assert table["test accuracy, best"] == ["80 (update 20)", "82 (update 2)"]
    assert table["test f1, best"] == ["-", "0.4 (update 1)"]
    assert table["test f1, last"] == ["-", "0.3"]


def test_a_terminal_gets_as_many_tables_as_the_runs_need(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    runs = two_runs(tmp_path)
    monkeypatch.setattr(compare, "width_of", lambda stream: 48)
    assert main(["compare", *runs]) == 0
    tables = [table.splitlines() for table in capsys.readouterr().out.split("\n\n")]
    assert [table[0].split() for table in tables] == [["a"], ["b"]]
    assert len(tables[0]) == len(tables[1]) > 5
    assert max(len(line) for table in tables for line in table) <= 48
    monkeypatch.setattr(compare, "width_of", lambda stream: 100)
    assert main(["compare", *runs]) == 0
    assert "\n\n" not in capsys.readouterr().out


def test_more_than_five_runs_have_the_command_of_their_coordinates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [f"run {number}" for number in range(6)]
    for name in names:
        write_run(tmp_path / name, updates=3)
    assert main(["compare", *names[:5]]) == 0
    assert capsys.readouterr().err == ""
    assert main(["compare", *names]) == 0
    label, command = capsys.readouterr().err.split(": raypod ")
    assert label == "parallel coordinates of these runs"
    assert main(shlex.split(command)) == 0
    assert "parallelAxis" in (tmp_path / "compare.html").read_text()


def test_a_metric_of_unknown_direction_has_no_best_and_paths_do_not_differ() -> None:
    table = {"columns": ["update", "samples", "time_s", "own"], "rows": [[1, 8, 1.0, 5.0], [2, 16, 2.0, float("nan")]]}
    (result, _) = results_of(table, table, ["own"], {})
    assert result == {"name": "own", "split": "training", "last": 5.0, "best": None, "update": None}
    assert differing_settings([{"run.run_dir": "a", "x": 1}, {"run.run_dir": "b", "x": 1, "y": 2}]) == ["y"]
