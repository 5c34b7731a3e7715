"""The metrics file and the TensorBoard event files."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import math
from pathlib import Path
from typing import Any, Iterable, List

import pytest

from raypod import train
from raypod.events import EvaluationDone, UpdateDone
from raypod.runs.metrics import events_in, flat, line_of
from raypod.runs.run_folder import last_update
from raypod.runs.sinks import JsonLines, LatestDetails, TensorBoardWriter
from tests.support.event_files import scalars
from tests.support.faulty_disks import FullDisk

FLAGS = ["--fleet", "inline", "--device", "emulated", "--lr-schedule", "constant", "--model", "tiny", "--tensorboard"]


def update(number: int, loss: float = 0.5) -> UpdateDone:
    return UpdateDone(number, 7, {"loss": loss, "accuracy": 75.0}, 32 * number, 1000.0, 2.0)


@pytest.fixture(autouse=True)
def ordered_event_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Number the event files of a test from 0: TensorBoard reads them by name, 10 before 9."""
    files = importlib.import_module("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(files, "_global_uid", files.AtomicCounter(0))


def write(path: Path, resumed_from: int, numbers: Iterable[int]) -> None:
    lines = JsonLines(path, UpdateDone, resumed_from)
    for number in numbers:
        lines.on_event(update(number))
    lines.close()


def test_lines_of_an_earlier_version_have_no_learning_rate_and_are_read() -> None:
    old = flat(update(3))
    assert not {"learning_rate", "metrics"} & set(old)
    assert events_in(UpdateDone, [old, {"update": 4}, {**old, "metrics": 3}]) == [update(3)]
    new = dataclasses.replace(update(3), learning_rate=0.1, loss_scaling=8.0, norms={"grad_norm": 0.5})
    new = dataclasses.replace(new, part_rates={"tokens_per_s": 9.0}, metrics={"loss": 0.5, "steps_per_s": 2.0})
    line = line_of(new)
    assert (line["metrics"], line["loss"], line["grad_norm"]) == (new.metrics, 0.5, 0.5)
    for each in (line, {name: value for name, value in line.items() if name not in new.metrics}):
        assert events_in(UpdateDone, [each]) == [new], "also without the metrics at the top level"


def updates_in(path: Path) -> List[int]:
    return [json.loads(text)["update"] for text in path.read_text().splitlines()]


@pytest.mark.parametrize("left", ['{"update": 4, "los', '{"update": 3, "loss": 1.0}'], ids=["truncated", "no newline"])
def test_a_resumed_run_has_no_duplicate_lines_and_ends_the_last_one(tmp_path: Path, left: str) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, (1, 2))
    line = json.loads(path.read_text().splitlines()[0])
    assert list(line)[:7] == ["update", "epoch", "loss", "accuracy", "samples", "samples_per_s", "time_s"]
    assert line["data_wait_share"] == 0
    with path.open("a") as file:
        file.write(left)
    resumed_from = 3 if left.endswith("}") else 1
    write(path, resumed_from, (resumed_from + 1, 5))
    assert updates_in(path) == [*range(1, resumed_from + 2), 5]


def test_a_resume_reads_the_end_of_the_metrics_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, parsed, loads = tmp_path / "metrics.jsonl", [], json.loads
    write(path, 0, range(1, 1001))
    before = path.stat().st_ino
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or loads(text))
    write(path, 1000, ())
    assert (path.stat().st_ino, len(parsed)) == (before, 1)  # nothing to remove, so the file stays
    write(path, 990, ())
    newest = last_update(tmp_path)
    assert newest is not None
    assert (newest.update, len(parsed)) == (990, 1 + 11 + 1)
    assert updates_in(path) == list(range(1, 991))


def test_unknown_results_are_null_with_the_instances_whose_report_is_missing(tmp_path: Path) -> None:
    unknown = dataclasses.replace(update(1), metrics={"loss": math.nan, "accuracy": math.nan}, missing_reports=(1, 3))
    lines, writer = JsonLines(tmp_path / "metrics.jsonl", UpdateDone, 0), TensorBoardWriter(tmp_path, 0)
    for sink in (lines, writer):
        sink.on_event(unknown)
        sink.close()
    found = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (found["loss"], found["accuracy"], found["missing_reports"]) == (None, None, [1, 3])
    assert scalars(tmp_path) == {"training/samples_per_s": [(1, 1000.0)]}


def test_updates_and_evaluations_become_scalars_once_after_a_resume(tmp_path: Path) -> None:
    for begun, numbers in ((0, (300, 301, 302)), (300, (301,))):
        writer = TensorBoardWriter(tmp_path, begun)
        for number in numbers:
            writer.on_event(update(number))
            writer.on_event(EvaluationDone(360, {"loss": 0.25, "accuracy": 99.0}, number, 7))
        writer.close()
    values = {"training/loss": 0.5, "training/accuracy": 75.0, "training/samples_per_s": 1000.0}
    values.update({"test/loss": 0.25, "test/accuracy": 99.0})
    assert scalars(tmp_path) == {tag: [(300, value), (301, value)] for tag, value in values.items()}


@pytest.mark.parametrize("is_written", [True, False])
def test_updates_that_are_computed_again_replace_those_of_before(tmp_path: Path, is_written: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    lines, writer = JsonLines(path, UpdateDone, 0), TensorBoardWriter(tmp_path, 0)
    for sink in (lines, writer):
        for number in range(1, 5):
            sink.on_event(update(number, loss=1.0))
        if is_written:
            sink.sync()
        for _ in range(2):
            sink.drop_after(2)
        for number in range(3, 6):
            sink.on_event(update(number, loss=2.0))
        sink.close()
    expected = [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    assert [(each["update"], each["loss"]) for each in map(json.loads, path.read_text().splitlines())] == expected
    assert scalars(tmp_path)["training/loss"] == expected


def test_lines_that_cannot_be_dropped_because_the_disk_is_full_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, disk = tmp_path / "metrics.jsonl", FullDisk(monkeypatch)
    lines = JsonLines(path, UpdateDone, 0)
    for number in (1, 2, 3):
        lines.on_event(update(number))
    disk.free_bytes = 0
    lines.drop_after(1)  # the first line cannot be copied
    lines.on_event(update(2))
    lines.drop_after(1)
    disk.free_bytes = None
    lines.close()
    assert updates_in(path) == [1, 2, 3, 2]
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_disk_that_fails_after_lines_were_dropped_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: List[str] = []
    disk = FullDisk(monkeypatch)
    lines = JsonLines(tmp_path / "metrics.jsonl", UpdateDone, 0, warnings.append)
    for number in (1, 2):
        lines.on_event(update(number))
    lines.drop_after(1)
    disk.free_bytes = 0
    lines.on_event(update(2))
    disk.free_bytes = None
    lines.close()
    assert len(warnings) == 1, warnings
    assert "metrics.jsonl" in warnings[0]


def test_the_details_of_an_evaluation_of_abandoned_weights_are_removed(tmp_path: Path) -> None:
    details = LatestDetails(tmp_path, 0, lambda text: None)
    details.on_event(EvaluationDone(10, {}, 6, 1, {"classes": []}))
    LatestDetails(tmp_path, 6, lambda text: None).drop_after(6)
    assert json.loads((tmp_path / "test.json").read_text())["update"] == 6
    details.drop_after(5)
    assert not (tmp_path / "test.json").exists()


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
        writer.on_event(update(number, loss=float(number)))
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
