"""The list of runs in a folder, and the data of one: versions, changes, and what is not followed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Dict, List

import pytest

from raypod.observe.dashboard import command as module
from raypod.observe.dashboard.command import RunsFolder
from tests.support.dashboard_folders import Run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four runs, and things that are no runs."""
    found = tmp_path / "runs"
    Run(found / "old", 1).state("failed", exit_code=1)
    Run(found / "done", 3).state("done", exit_code=0)
    Run(found / "alive", 2)
    Run(found / "killed").state("running", ticks=1)
    Run(tmp_path / "secret", 1)
    (found / "empty").mkdir()
    (found / "file").write_text("")
    return found


def states(runs: RunsFolder) -> Dict[str, str]:
    return {run["name"]: run["state"] for run in runs.list()}


def test_the_list_begins_with_what_is_alive_then_with_the_newest_and_follows_changes(folder: Path) -> None:
    runs = RunsFolder(folder)
    expected = [("alive", "running"), ("done", "done"), ("old", "failed"), ("killed", "died")]
    assert list(states(runs).items()) == expected
    first = runs.list()[0]
    assert {**first, "loss": 0.5, "restarts": 1, "total_updates": 1000, "samples_per_s": 80.0} == first
    Run(folder / "new", 5)
    (folder / "old" / "state.json").unlink()
    shutil.rmtree(str(folder / "done"))
    assert states(runs) == {"new": "running", "alive": "running", "killed": "died", "old": "unknown"}


def test_unchanged_runs_are_not_read_again_and_few_are_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, read, names = RunsFolder(folder), module.run_state.read, []  # type: ignore[var-annotated]
    monkeypatch.setattr(module.run_state, "read", lambda path: names.append(path.name) or read(path))
    for _ in range(2):
        runs.list()
        assert [name for name in names if name in ("done", "old")] == ["done", "old"]
    monkeypatch.setattr(module, "_MAX_READERS", 2)
    runs = RunsFolder(folder)
    for name in ("done", "old", "done", "alive"):
        assert runs.data(name, 100, "") is not None
    assert list(runs._readers) == ["done", "alive"]
    runs = RunsFolder(folder / "done")
    assert states(runs) == {"done": "done"}
    assert runs.data("done", 100, "") is not None


def test_links_and_pipes_are_not_followed_and_a_name_is_no_path(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    (folder / "linked").symlink_to(secret, target_is_directory=True)
    for name in ("metrics.jsonl", "state.json", "config.yaml"):
        file = Run(folder / f"with-{name}").path / name
        if file.exists():
            file.unlink()
        file.symlink_to(secret / "metrics.jsonl")
    os.mkfifo(Run(folder / "with-pipe").path / "events.jsonl")
    runs = RunsFolder(folder)
    assert set(states(runs)) == {"alive", "done", "old", "killed"}
    names = ["linked", "with-metrics.jsonl", "with-pipe", "", ".", "..", "../secret", str(secret), "done/", "\0"]
    names += ["done/../old", "empty", "file"]
    assert [name for name in names if runs.data(name, 100, "") is not None] == []
    assert runs.data("alive", 100, "") is not None
    (folder / "alive" / "events.jsonl").symlink_to(secret / "metrics.jsonl")
    assert runs.data("alive", 100, "") is None


def losses(data: Any) -> List[float]:
    return [row[data["curves"]["columns"].index("loss")] for row in data["curves"]["rows"]]


def test_data_has_a_version_and_follows_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOVING_S", 1e12)
    run = Run(tmp_path / "runs" / "a", 2)
    runs: Any = RunsFolder(tmp_path / "runs")
    first = runs.data("a", 100, "")
    assert losses(first.data) == [1.0, 0.5]
    assert runs.data("a", 100, first.word) == (first.word, None)
    run.train(2)
    second = runs.data("a", 100, first.word)
    assert (len(losses(second.data)), second.data["state"]) == (4, "running")
    run.state("done", exit_code=0)
    third = runs.data("a", 100, second.word)
    assert third.data["state"] == "done"
    assert RunsFolder(tmp_path / "runs").data("a", 100, third.word) != third  # the versions of another server differ
