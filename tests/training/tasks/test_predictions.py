"""Predictions for each test sample, and the metrics of all of them: for any placement, in the order of the samples."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import raypod
from raypod.__main__ import main
from raypod.api.inference.evaluate import evaluate
from raypod.errors import ConfigError
from raypod.observe.report.run_data import RunReader
from raypod.plan.config import Config
from raypod.plan.metric import SAMPLE
from raypod.runs.predictions import check_format, in_sample_order, write
from raypod.training.data import digits
from raypod.training.data.loading import SeededSamples
from raypod.training.data.pixels import thumbnail
from raypod.training.data.read_failures import ReadFailed
from raypod.training.models import predictions as module
from raypod.training.tasks import image_classification
from raypod.training.tasks.classification import calibration_error, top_accuracy

TEST = 23  # samples: no whole number of calls of any placement


class Ordered(raypod.Task):
    """Its predictions tell the sample: with a wrong order or padding, `ordered` is not 1."""

    predictions = ("number", "pair", "is_even")
    test_metrics = (raypod.Metric("ordered", "higher"),)
    best = "ordered"

    def datasets(self) -> Any:
        x = np.arange(TEST, dtype=np.float32)
        return raypod.Arrays(x=x[:16]), raypod.Arrays(x=x)

    def network(self, first_batch: Any) -> nn.Module:
        return nn.Linear(1, 1)

    def training_outputs(self, network: Any, x: Any) -> Any:
        return nn.functional.mse_loss(network(x[:, None])[:, 0], 0 * x), {}

    def evaluation_outputs(self, network: Any, x: Any) -> Any:
        ratios = {"loss": (network(x[:, None])[:, 0] ** 2, 1)}
        return ratios, {"number": x.to(torch.int32), "pair": torch.stack([x, -x], dim=1).half(), "is_even": x % 2 == 0}

    def prediction_metrics(self, predictions: Any) -> Dict[str, Any]:
        numbers, pairs, even = (predictions[name] for name in self.predictions)
        assert (numbers.dtype, pairs.dtype, even.dtype) == (np.int64, np.float32, np.bool_)
        is_ordered = (numbers == np.arange(TEST)).all() and (pairs[:, 1] == -numbers).all() and even[::2].all()
        return {"ordered": np.float32(is_ordered)}


class Wrong(Ordered):
    def evaluation_outputs(self, network: Any, x: Any) -> Any:
        return super().evaluation_outputs(network, x)[0], {"number": x}


class Short(Ordered):
    def evaluation_outputs(self, network: Any, x: Any) -> Any:
        ratios, found = super().evaluation_outputs(network, x)
        return ratios, {**found, "pair": x.sum()}


class Other(Ordered):
    def prediction_metrics(self, predictions: Any) -> Dict[str, Any]:
        return {"other": 1.0}


class Nothing(Ordered):
    predictions = ()


def fit(task: Any, folder: Path, **flags: Any) -> raypod.Result:
    sizes = {"batch_size": 2, "updates": 2, "epochs": 1, "lr_schedule": "constant", "replicas": 2}
    return raypod.fit(
        task=task, run_dir=folder, fleet="inline", device="emulated", progress=False, **{**sizes, **flags}
    )


@pytest.mark.parametrize("flags", [{"replicas": 1}, {"replicas": 4, "evaluation_iterations": 3}])
def test_metrics_are_of_all_samples_in_their_order(tmp_path: Path, flags: Any) -> None:
    result = fit(Ordered, tmp_path / "run", **flags)
    assert result.summary["test_ordered"] == 1
    (line,) = (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()
    assert list(json.loads(line)) == ["samples", "loss", "ordered", "update", "epoch"]
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["metrics"]["ordered"] == "higher"
    assert result.best_checkpoint is not None
    file = tmp_path / "rows.csv"
    found = evaluate(tmp_path / "run", predictions=file, replicas=2, trust=f"{__name__}:Ordered")
    assert found["ordered"] == 1
    header, *rows = csv.reader(file.read_text().splitlines())
    assert header == ["sample", "number", "pair_0", "pair_1", "is_even"]
    assert rows[3] == ["3", "3", "3.0", "-3.0", "False"]
    assert len(rows) == TEST


def test_the_parts_of_instances_are_sorted_by_sample() -> None:
    parts = [{SAMPLE: np.array(own), "x": 10.0 * np.array(own)} for own in ([0, 1, 4, 5], [], [2, 3, 6])]
    found = in_sample_order(parts)
    assert found[SAMPLE].tolist() == list(range(7))
    assert (found["x"] == 10 * found[SAMPLE]).all()


def test_optimizers_of_other_libraries_are_refused_with_the_reason(tmp_path: Path) -> None:
    class Gan(Ordered):
        def configure_optimizers(self) -> Any:
            return []

    with pytest.raises(ConfigError, match=r"configure_optimizers has no effect: a compiled model has one optimizer"):
        fit(Gan, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (
            Wrong,
            r"Wrong.evaluation_outputs \(test_predictions.py:\d+\) returned the predictions 'number'; `predictions`",
        ),
        (Short, r"Short.evaluation_outputs .* 'pair' is a 0-d tensor; a prediction is a tensor \[2, ...\]"),
        (Nothing, "test_metrics are computed of predictions; name those in `predictions`"),
        (Other, "Other.prediction_metrics returned 'other'; `test_metrics` are 'ordered'"),
    ],
)
def test_wrong_predictions_are_an_error_with_their_place(task: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        fit(task, tmp_path / "run")
    assert task is Other or not (tmp_path / "run" / "metrics.jsonl").exists()  # before the first update


def test_predictions_have_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1 << 8)
    words = "a sample have 17 bytes .*'pair' 8.*, those of 23 test samples 0 MiB; at most 0 MiB are kept"
    with pytest.raises(ConfigError, match=words):
        fit(Ordered, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_image_classification_reports_its_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    raypod.fit(run_dir=run, fleet="inline", device="emulated", model="tiny", replicas=2, updates=2, progress=False)
    (line,) = map(json.loads, (run / "evaluations.jsonl").read_text().splitlines())
    reader = RunReader(run)
    reader.refresh()
    test = reader.data()["test"]
    matrix = np.array(test["confusion"])
    assert matrix.sum() == test["samples"] == line["samples"]
    assert 100 * np.trace(matrix) / matrix.sum() == line["accuracy"] <= line["top5_accuracy"]
    assert test["per_class"]["samples"] == matrix.sum(axis=1).tolist()
    file = tmp_path / "rows.csv"
    assert main(["evaluate", str(run), "--predictions", str(file)]) == 0
    rows = list(csv.DictReader(file.read_text().splitlines()))
    first = [row["label"] == row["classes_0"] for row in rows]
    assert 100 * sum(first) / len(rows) == line["accuracy"]
    capsys.readouterr()
    assert main(["evaluate", str(run), "--predictions", "/no/such/folder/x.csv"]) == 2
    assert "--predictions /no/such/folder/x.csv: the folder /no/such/folder does not exist" in capsys.readouterr().err


def test_the_report_shows_the_most_confident_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, left_out = tmp_path / "run", ["test:0", "test:7"]
    flags = {"model": "tiny", "updates": 2, "leave_out": left_out, "report_samples": 4, "resize": 32}
    raypod.fit(run_dir=run, fleet="inline", device="emulated", progress=False, **flags)
    assert main(["evaluate", str(run), "--predictions", str(tmp_path / "rows.csv"), "--json"]) == 0
    assert "errors" not in json.loads(capsys.readouterr().out)["details"]
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    wrong = [row for row in rows if row["label"] != row["classes_0"]]
    expected = sorted(wrong, key=lambda row: -float(row["probabilities_0"]))[:4]
    errors = json.loads((run / "test.json").read_text())["errors"]
    assert [(each["sample"], each["label"], each["predicted"]) for each in errors] == [
        (int(row["sample"]), int(row["label"]), int(row["classes_0"])) for row in expected
    ]
    assert errors[0]["confidence"] == pytest.approx(float(expected[0]["probabilities_0"]))
    for error in errors:
        known = [row for row in rows if int(row["sample"]) == error["sample"]]
        top = {known[0][f"classes_{number}"]: float(known[0][f"probabilities_{number}"]) for number in range(5)}
        assert error["label_probability"] == pytest.approx(top.get(str(error["label"])))
        image = decoded(error["image"])
        assert image.size == (8, 8)
        assert (np.asarray(image) == digits.load(Config()).test.images[error["sample"], 0]).all()
    assert all(error["image"] in (run / "report.html").read_text() for error in errors)
    reader = RunReader(run)
    reader.refresh()
    assert len(reader.data(max_rows=100)["test"]["errors"]) == 3  # a page of many runs has fewer
    words = ["train", "--task", "language-model", "--report-samples", "3", "--dry-run"]
    assert main(words) == 2
    assert "--report-samples has no effect on the task language-model: omit it" in capsys.readouterr().err


def decoded(url: str) -> Any:
    return Image.open(io.BytesIO(base64.b64decode(url.partition(";base64,")[2])))


@pytest.mark.parametrize(
    ("image", "size"),
    [
        (np.random.default_rng(0).integers(0, 256, (3, 300, 200)).astype(np.uint8), (64, 96)),
        (np.array([[[-1.0, np.nan], [3.0, np.inf]]], dtype=np.float32), (2, 2)),
        (np.zeros((4, 5, 6), dtype=np.float32), (6, 5)),
    ],
)
def test_a_thumbnail_has_a_bounded_size(image: Any, size: Any) -> None:
    url = thumbnail(image)
    assert len(url) < 12_000
    assert decoded(url).size == size
    if size == (2, 2):
        assert np.asarray(decoded(url)).tolist() == [[0, 0], [255, 255]]


def test_an_image_that_cannot_be_read_is_left_out_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unreadable(SeededSamples):
        def __getitem__(self, key: Any) -> Any:
            raise ReadFailed("OSError: the disk is gone")

    monkeypatch.setattr(image_classification, "SeededSamples", Unreadable)
    flags = {"model": "tiny", "updates": 2, "report_samples": 1}
    with pytest.warns(RuntimeWarning, match="the report has no image of test sample .*: OSError: the disk is gone"):
        raypod.fit(run_dir=tmp_path / "run", fleet="inline", device="emulated", progress=False, **flags)
    (error,) = json.loads((tmp_path / "run" / "test.json").read_text())["errors"]
    assert error["image"] is None


def test_parquet_needs_pyarrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert main(["evaluate", str(tmp_path), "--predictions", "x.parquet"]) == 2
    assert "--predictions x.parquet needs pyarrow, which is not installed: pip" in capsys.readouterr().err


def test_a_task_may_change_the_arrays_which_other_processes_send_read_only() -> None:
    sent = np.arange(3)
    sent.setflags(write=False)

    def change(predictions: Any) -> Dict[str, Any]:
        predictions["x"] += 1
        return {"total": predictions["x"].sum()}

    task = SimpleNamespace(prediction_metrics=change, prediction_details=change)
    facts: Any = SimpleNamespace(test_metrics=[raypod.Metric("total")])
    assert module.measured(task, facts, {SAMPLE: sent, "x": sent}) == ({"total": 6.0}, {"total": 6})


def test_parquet_has_the_same_columns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a table of this test: pyarrow is no dependency."""
    written: Dict[str, Any] = {}
    parquet = SimpleNamespace(write_table=lambda table, buffer: written.update(table) or buffer.write(b"PAR1"))
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(table=dict))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    check_format(tmp_path / "x.parquet")
    write(tmp_path / "x.parquet", {SAMPLE: np.arange(2), "pair": np.array([[1, 2], [3, 4]])})
    columns = {name: column.tolist() for name, column in written.items()}
    assert columns == {SAMPLE: [0, 1], "pair_0": [1, 3], "pair_1": [2, 4]}
    assert (tmp_path / "x.parquet").read_bytes() == b"PAR1"


def test_the_numbers_of_a_classifier() -> None:
    labels, predicted = np.array([0, 0, 1, 1, 1, 3]), np.array([0, 1, 1, 1, 0, 1])
    details = raypod.classification_details(labels, predicted, np.array([0.9, 0.55, 0.9, 0.9, 0.55, 0.9]), list("abcd"))
    assert details["confusion"] == [[1, 1, 0, 0], [1, 2, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]]
    assert details["confused"] == [[0, 1, 1], [1, 0, 1], [3, 1, 1]]
    with pytest.raises(ConfigError, match="class 3 has no name; there are 3 names"):
        raypod.classification_details(labels, predicted, names=list("abc"))
    assert details["per_class"]["precision"][:2] == [0.5, 0.5]
    assert details["per_class"]["recall"][1] == 2 / 3
    assert math.isnan(details["per_class"]["recall"][2])
    assert [(each["samples"], each["accuracy"]) for each in details["calibration"]] == [(2, 0), (4, 0.75)]
    error = calibration_error(labels, predicted, np.array([0.9, 0.55, 0.9, 0.9, 0.55, 0.9]))
    assert error == pytest.approx(100 * (2 * 0.55 + 4 * 0.15) / 6)
    assert top_accuracy(labels, np.array([[1, 0], [1, 2], [0, 2], [0, 1], [1, 3], [3, 0]])) == pytest.approx(
        100 * 4 / 6
    )
