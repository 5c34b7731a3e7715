"""The metrics file and the TensorBoard event files."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
from event_files import scalars

from raypod import train
from raypod.events import EvaluationDone, UpdateDone
from raypod.record.run_folder import last_update
from raypod.record.sinks import JsonLines, TensorBoardWriter

FLAGS = ["--fleet", "inline", "--device", "emulated", "--lr-schedule", "constant", "--model", "tiny", "--tensorboard"]


def update(number: int, loss: float = 0.5) -> UpdateDone:
    return UpdateDone(number, 7, {"loss": loss, "accuracy": 75.0}, 32 * number, 1000.0, 2.0)


def test_a_resumed_run_has_no_duplicate_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path, UpdateDone, 0)
    for number in (1, 2, 3):
        first.handle(update(number))
    first.close()
    with path.open("a") as file:
        file.write('{"update": 4, "los')  # truncated by a crash
    again = JsonLines(path, UpdateDone, 2)
    again.handle(update(3))
    again.close()
    assert [json.loads(text)["update"] for text in path.read_text().splitlines()] == [1, 2, 3]


def test_a_resume_reads_the_end_of_the_metrics_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, parsed = tmp_path / "metrics.jsonl", []
    first = JsonLines(path, UpdateDone, 0)
    for number in range(1, 1001):
        first.handle(update(number))
    first.close()
    before = path.stat().st_ino
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or loads(text))
    JsonLines(path, UpdateDone, 1000).close()
    assert (path.stat().st_ino, len(parsed)) == (before, 1)  # nothing to remove, so the file stays
    JsonLines(path, UpdateDone, 990).close()
    newest = last_update(tmp_path)
    assert newest is not None
    assert (newest.update, len(parsed)) == (990, 1 + 11 + 1)
    assert [loads(text)["update"] for text in path.read_text().splitlines()] == list(range(1, 991))


def test_a_last_line_without_its_newline_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"update": 1}\n{"update": 2}')
    lines = JsonLines(path, UpdateDone, 2)
    lines.handle(update(3))
    lines.close()
    assert [json.loads(text)["update"] for text in path.read_text().splitlines()] == [1, 2, 3]


def test_a_line_has_the_documented_keys(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl", UpdateDone, 0)
    lines.handle(update(1))
    lines.close()
    keys = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert list(keys)[:7] == ["update", "epoch", "loss", "accuracy", "samples", "samples_per_s", "time_s"]
    assert keys["data_wait_share"] == 0


def test_unknown_results_are_null_with_the_instances_whose_report_is_missing(tmp_path: Path) -> None:
    unknown = dataclasses.replace(update(1), metrics={"loss": math.nan, "accuracy": math.nan}, missing_reports=(1, 3))
    lines, writer = JsonLines(tmp_path / "metrics.jsonl", UpdateDone, 0), TensorBoardWriter(tmp_path, 0)
    for sink in (lines, writer):
        sink.handle(unknown)
        sink.close()
    found = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (found["loss"], found["accuracy"], found["missing_reports"]) == (None, None, [1, 3])
    assert scalars(tmp_path) == {"training/samples_per_s": [(1, 1000.0)]}


def test_updates_and_evaluations_become_scalars(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path, 300)
    writer.handle(update(301))
    writer.handle(EvaluationDone(360, {"loss": 0.25, "accuracy": 99.0}, 301, 7))
    writer.close()
    assert scalars(tmp_path) == {
        "training/loss": [(301, 0.5)],
        "training/accuracy": [(301, 75.0)],
        "training/samples_per_s": [(301, 1000.0)],
        "test/loss": [(301, 0.25)],
        "test/accuracy": [(301, 99.0)],
    }


def test_each_update_is_shown_once_after_a_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = [*FLAGS, "--run-dir", str(folder), "--checkpoint-every", "2 updates"]
    assert train.main([*flags, "--updates", "3"]) == 0
    earlier = folder / "checkpoints" / "update-00000002"
    assert train.main([*flags, "--updates", "6", "--resume", str(earlier)]) == 0
    found = scalars(folder)
    assert [step for step, _ in found["training/loss"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in found["test/accuracy"]] == [6]


def test_points_of_a_full_disk_are_written_once_there_is_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("torch.utils.tensorboard")
    is_full = False

    class FullDisk(module.SummaryWriter):  # type: ignore[misc, name-defined]
        def flush(self) -> None:
            if is_full:
                self.close()
                raise OSError("no space left on device")
            super().flush()

    monkeypatch.setattr(module, "SummaryWriter", FullDisk)
    writer = TensorBoardWriter(tmp_path, 0)
    for number in range(1, 7):
        is_full = 2 <= number < 5
        writer.handle(update(number, loss=float(number)))
        writer.sync()
    writer.close()
    assert scalars(tmp_path)["training/loss"] == [(number, float(number)) for number in range(1, 7)]


def test_a_missing_package_is_one_line_and_leaves_no_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec

    def without_tensorboard(name: str, package: Any = None) -> Any:
        return None if name == "tensorboard" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_tensorboard)
    assert train.main([*FLAGS, "--updates", "2", "--run-dir", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--tensorboard needs the package tensorboard" in line
    assert line.endswith("pip install 'raypod[tensorboard]'")
    assert not (tmp_path / "run").exists()
