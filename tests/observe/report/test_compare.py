"""`raypod compare`, and the results of a run in the data of a report."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, List

import pytest

from raypod.__main__ import main
from raypod.observe.report import compare
from raypod.observe.report.run_data import differing_settings, results_of
from tests.support.run_folders import update_record, write_lines, write_run


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
def test_a_folder_of_runs_is_named_with_the_way(command: str, tmp_path: Path, capsys: Any) -> None:
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


def test_more_than_five_runs_have_the_command_of_their_parallel_coordinates(
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


@pytest.mark.parametrize(("words", "message"), [([], "RUN"), (["a"], "two different runs"), (["a", "none"], "none")])
def test_wrong_words_are_one_line(words: Any, message: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    two_runs(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
