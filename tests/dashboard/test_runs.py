from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, List

import pytest
from dashboard.folders import Run

from raypod.dashboard import runs as module
from raypod.dashboard.runs import RunsFolder
from raypod.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four runs, and things that are no runs."""
    found = tmp_path / "runs"
    Run(found / "old").train(1)
    Run(found / "done").train(3)
    Run(found / "alive").train(2)
    Run(found / "killed").state("running", ticks=1)
    Run(tmp_path / "secret").train(1)
    for name, exit_code in (("old", 1), ("done", 0)):
        state = (found / name / "state.json").read_text()
        ended = {0: "done", 1: "failed"}[exit_code]
        state = state.replace('"running"', f'"{ended}"').replace('"exit_code": null', f'"exit_code": {exit_code}')
        (found / name / "state.json").write_text(state)
    (found / "empty").mkdir()
    (found / "file").write_text("")
    return found


def states(runs: RunsFolder) -> Dict[str, str]:
    return {run["name"]: run["state"] for run in runs.list()}


def test_the_list_begins_with_what_is_alive_then_with_the_newest(folder: Path) -> None:
    runs = RunsFolder(folder)
    expected = [("alive", "running"), ("done", "done"), ("old", "failed"), ("killed", "died")]
    assert list(states(runs).items()) == expected
    first = runs.list()[0]
    assert {**first, "loss": 0.5, "restarts": 1, "total_updates": 1000, "samples_per_s": 80.0} == first


def test_the_list_follows_changes(folder: Path) -> None:
    runs = RunsFolder(folder)
    runs.list()
    Run(folder / "new").train(5)
    (folder / "old" / "state.json").unlink()
    for path in [*(folder / "done").iterdir(), folder / "done"]:
        path.unlink() if path.is_file() else path.rmdir()
    assert states(runs) == {"new": "running", "alive": "running", "killed": "died", "old": "unknown"}


def test_unchanged_runs_are_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, read = RunsFolder(folder), []  # type: ignore[var-annotated]
    original = module.run_state.read
    monkeypatch.setattr(module.run_state, "read", lambda path: read.append(path.name) or original(path))
    runs.list()
    assert len(read) == 4
    runs.list()
    assert len(read) == 4


def test_links_and_pipes_are_not_followed(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    (folder / "linked").symlink_to(secret, target_is_directory=True)
    for name in ("metrics.jsonl", "state.json", "config.yaml"):
        run = Run(folder / f"with-{name}").path
        (run / name).unlink() if (run / name).exists() else None
        (run / name).symlink_to(secret / "metrics.jsonl")
    os.mkfifo(Run(folder / "with-pipe").path / "events.jsonl")
    runs = RunsFolder(folder)
    assert set(states(runs)) == {"alive", "done", "old", "killed"}
    for name in ("linked", "with-metrics.jsonl", "with-pipe"):
        assert runs.data(name, 100, "") is None
    assert runs.data("alive", 100, "") is not None
    (folder / "alive" / "events.jsonl").symlink_to(secret / "metrics.jsonl")
    assert runs.data("alive", 100, "") is None


def test_a_name_is_no_path(folder: Path, tmp_path: Path) -> None:
    runs = RunsFolder(folder)
    names = ["", ".", "..", "../secret", str(tmp_path / "secret"), "done/", "done/../old", "empty", "file", "\0"]
    assert [name for name in names if runs.data(name, 100, "") is not None] == []


def losses(data: Dict[str, Dict[str, List[List[float]]]]) -> List[float]:
    return [row[data["curves"]["columns"].index("loss")] for row in data["curves"]["rows"]]  # type: ignore[call-overload]


def test_data_has_a_version_and_follows_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOVING_S", 1e12)
    run = Run(tmp_path / "runs" / "a")
    run.train(2)
    runs = RunsFolder(tmp_path / "runs")
    first = runs.data("a", 100, "")
    assert first is not None
    assert first.data is not None
    assert losses(first.data) == [1.0, 0.5]
    assert runs.data("a", 100, first.word) == (first.word, None)
    run.train(2)
    second = runs.data("a", 100, first.word)
    assert second is not None
    assert second.data is not None
    assert (len(losses(second.data)), second.data["state"]) == (4, "running")
    run.state("done", exit_code=0)
    third = runs.data("a", 100, second.word)
    assert third is not None
    assert third.data is not None
    assert third.data["state"] == "done"
    assert RunsFolder(tmp_path / "runs").data("a", 100, third.word) != third  # the versions of another server differ


def test_the_number_of_open_runs_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_READERS", 2)
    runs = RunsFolder(folder)
    for name in ("done", "old", "done", "alive"):
        assert runs.data(name, 100, "") is not None
    assert list(runs._readers) == ["done", "alive"]


def test_a_run_folder_is_a_folder_of_one_run(folder: Path) -> None:
    runs = RunsFolder(folder / "done")
    assert states(runs) == {"done": "done"}
    assert runs.data("done", 100, "") is not None


@pytest.mark.parametrize(("name", "problem"), [("missing", "the folder does not exist"), ("file", "is not a folder")])
def test_a_folder_that_is_none_is_a_mistake(folder: Path, name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"dashboard .*{name}: {problem}; give the folder"):
        RunsFolder(folder / name)
