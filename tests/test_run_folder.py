"""The run folder: which one a run takes, and that what is in it survives."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Callable, Iterator

import pytest

from raypod import train

QUICK = ("--model", "tiny", "--lr-schedule", "constant", "--warmup-updates", "0")


def command(*flags: str) -> int:
    return train.main(["--fleet", "inline", "--device", "emulated", *flags])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run of 3 updates, of which it kept 2 checkpoints."""
    run = tmp_path / "run"
    assert command(*QUICK, "--updates", "3", "--checkpoint-every", "2 updates", "--run-dir", str(run)) == 0
    return run


def cut_off(folder: Path) -> Path:
    """Its coordinator died before it could say how the run ended."""
    state = json.loads((folder / "state.json").read_text())
    left = {**state, "state": "running", "exit_code": None, "started_ticks": 1}
    (folder / "state.json").write_text(json.dumps(left))
    return folder


@pytest.mark.parametrize("how", ["--resume={}", "--resume={}/checkpoints/update-00000002", "run.resume={}"])
def test_however_a_run_is_named_it_goes_on_in_its_folder_with_its_config(how: str, folder: Path) -> None:
    assert command(how.format(folder), "--updates", "5") == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["updates"], Path(summary["checkpoint"]).parent) == (5, folder / "checkpoints")
    assert "model: tiny" in (folder / "config.yaml").read_text()
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 5


def test_a_run_does_not_go_on_in_the_folder_of_another_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    assert command(*QUICK, "--updates", "2", "--seed", "1", "--run-dir", str(other)) == 0
    before = (cut_off(other) / "config.yaml").read_bytes()
    assert command("--resume", str(folder), "--updates", "5", "--run-dir", str(other)) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert (other / "config.yaml").read_bytes() == before


@pytest.fixture
def no_file_may_grow() -> Iterator[Callable[[], None]]:
    """A full disk, as a process sees it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_files_of_a_run_as_they_were(
    folder: Path, no_file_may_grow: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    capsys.readouterr()
    no_file_may_grow()
    assert command("--resume", str(folder), "--updates", "5") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot write into the run folder" in line
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_a_disk_that_is_full_at_the_end_is_one_line(
    tmp_path: Path,
    no_file_may_grow: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write = train.run_folder.write_summary

    def on_a_full_disk(*arguments: object) -> None:
        no_file_may_grow()
        write(*arguments)

    monkeypatch.setattr(train.run_folder, "write_summary", on_a_full_disk)
    assert command(*QUICK, "--updates", "2", "--run-dir", str(tmp_path / "run")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "summary.json cannot be written" in line
