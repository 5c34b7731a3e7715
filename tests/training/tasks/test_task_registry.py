"""Tasks by name, their options, what is rejected, and their predictions for each test sample."""

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
from raypod import train
from raypod.__main__ import main
from raypod.api import planning
from raypod.api.inference.evaluate import evaluate
from raypod.errors import ConfigError
from raypod.observe.report.run_data import RunReader
from raypod.plan.config import Config
from raypod.plan.metric import SAMPLE
from raypod.plan.plan import Plan
from raypod.runs.predictions import check_format, in_sample_order, write
from raypod.training.data import digits
from raypod.training.data.loading import SeededSamples
from raypod.training.data.pixels import thumbnail
from raypod.training.data.read_failures import ReadFailed
from raypod.training.data.samples import SampleSource
from raypod.training.models import predictions as module
from raypod.training.tasks import image_classification, registry
from raypod.training.tasks.classification import calibration_error, top_accuracy
from tests.support.refused import refused

MODULE = """
import raypod, torch
from pydantic import Field
from torch import nn
class Task(raypod.Task):
    class Options(raypod.TaskOptions):
        width: int = Field(4, ge=1, le=64, description="features")
    metrics = (raypod.Metric("size"),)
    defaults = {"training.batch_size": 2}
    def datasets(self):
        x = torch.randn(64, self.options.width, generator=torch.Generator().manual_seed(1))
        return raypod.Arrays(x=x), raypod.Arrays(x=x[:7])
    def network(self, first_batch): return nn.Linear(first_batch[0].shape[1], 1)
    def training_outputs(self, network, x):
        return nn.functional.mse_loss(network(x), x[:, :1]), {"size": (x.abs().sum(), x.numel())}
    def evaluation_outputs(self, network, x):
        return {"loss": ((network(x) - x[:, :1]).squeeze(1) ** 2, 1), "size": (x.abs().sum(1), x.shape[1])}
class Clash(Task):
    class Options(raypod.TaskOptions): epochs: int = Field(1, description="clashes with training.epochs")
class Alias(Task):
    class Options(raypod.TaskOptions): num_replicas: int = Field(1, description="has the flag of pod.replicas")
class Switch(Task):
    class Options(raypod.TaskOptions): dry_run: bool = Field(False, description="has a flag of the command")
class Negated(Task):
    class Options(raypod.TaskOptions): no_augment: int = Field(0, description="has the flag of data.augment = false")
class OfSummary(Task): metrics = (raypod.Metric("weights_sha256"),)
class Percent(Task): metrics = (raypod.Metric("size"), raypod.Metric("loss", scale=100.0, unit="%"))
class Reserved(Task): metrics = (raypod.Metric("samples"),)
class Best(Task): best = "accuracy"
class NoMetric(Task):
    def training_outputs(self, network, x): return nn.functional.mse_loss(network(x), x[:, :1]), {}
class LossOnly(Task):
    def training_outputs(self, network, x): return nn.functional.mse_loss(network(x), x[:, :1])
class LossOfSamples(Task):
    def training_outputs(self, network, x):
        return nn.functional.mse_loss(network(x), x[:, :1], reduction="none"), {"size": (1, 1)}
class OwnLoss(Task):
    def training_outputs(self, network, x): return (network(x) - x[:, :1]).square().mean(), {"size": (1, 1)}
class Penalized(OwnLoss):
    def training_outputs(self, network, x):
        loss = nn.functional.mse_loss(network(x), x[:, :1]) + nn.functional.l1_loss(network(x), x[:, :1])
        return loss + 10 * network.weight.abs().sum(), {"size": (network.weight.abs().sum(), 1)}
class Lasso(Task):
    def penalty(self, network):
        return sum(each.abs().sum() for each in network.parameters()) + network.weight.square().sum()
    def training_outputs(self, network, x):
        import poptorch
        loss = nn.functional.mse_loss(network(x), x[:, :1]) + 0.1 * self.penalty(network)
        return poptorch.identity_loss(loss, reduction="none"), {"size": (self.penalty(network), 1)}
    def evaluation_outputs(self, network, x):
        losses = (network(x) - x[:, :1]).squeeze(1) ** 2
        return {"loss": (losses, 1), "size": (self.penalty(network).repeat(len(x)), 1)}
class WholeBatch(Task):
    def evaluation_outputs(self, network, x):
        return {"loss": (network(x).mean(), 1), "size": (x.abs().sum(1), x.shape[1])}
class WholeBatchOfOne(Task):
    def evaluation_outputs(self, network, x):
        return {"loss": (network(x).mean(0), 1), "size": (x.abs().sum(1), x.shape[1])}
class NoNetwork(Task):
    def network(self, first_batch): nn.Linear(first_batch[0].shape[1], 1)
class OfBatch(Task):
    def training_outputs(self, network, batch):
        return nn.functional.mse_loss(network(batch), batch[:, :1]), {"size": (1, 1)}
class OfPairs(Task):
    def datasets(self): return [(torch.zeros(4), torch.zeros(1))] * 64, None
class NoTuple(Task): metrics = raypod.Metric("size")
class OfNames(Task): metrics = ("size",)
class OneName(Task): predictions = ("label")
class NoLoss(Task):
    def evaluation_outputs(self, network, x): return {"size": (x.abs().sum(1), x.shape[1])}
class Nested(Task):
    def datasets(self): return [{"x": {"y": 1}}] * 64, None
class ByName(Task):
    def network(self, first_batch):
        assert first_batch["x"] is first_batch[0] and len(first_batch) == 1
        return nn.Linear(first_batch["x"].shape[1], 1)
class ByWrongName(Task):
    def network(self, first_batch): return nn.Linear(first_batch["y"].shape[1], 1)
class Ragged(Task):
    def datasets(self): return [{"x": torch.zeros(4)}, *[{"x": torch.zeros(i % 3 + 3)} for i in range(63)]], None
class RaggedTest(Task):
    def datasets(self): return [(torch.zeros(4),)] * 64, [(torch.zeros(4),)] * 3 + [(torch.zeros(5),)]
class Unreadable(list):
    def __getitem__(self, index):
        if index == 63:
            raise OSError("damaged")
        return super().__getitem__(index)
class Skips(Task):
    def datasets(self): return Unreadable([(torch.zeros(4),)] * 64), None
class Uneven(Task):
    def datasets(self): return raypod.Arrays(x=torch.zeros(3), y=torch.zeros(4)), None
class OnlyTrain(Task):
    def datasets(self): return [(torch.full((4,), float(i)),) for i in range(64)], None
class Other: pass
def twelve(channels, classes): return nn.Sequential(nn.Flatten(), nn.Linear(64 * channels, 12))
"""
NO_BATCH = "cannot be combined to a batch:"
PAD = "resize or pad them in the data set, or by a line of the task, `collate = raypod.pad_collate(64, 128)`"
LINE = "training_outputs (registered_tasks.py:LINE)"
PIPELINE = ["--ipus-per-replica", "2", "--gradient-accumulation", "3", "--pipeline-splits", "x"]
FLAGS = ["--fleet", "inline", "--updates", "2", "--device", "emulated"]
INLINE: Dict[str, Any] = {"fleet": "inline", "device": "emulated", "progress": False}
TEST = 23  # samples: no whole number of calls of any placement


@pytest.fixture(autouse=True)
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "registered_tasks.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def run(task: str, *flags: str) -> int:
    return train.main(["--task", task if ":" in task else f"registered_tasks:{task}", *FLAGS, *flags])


def plan_of(*words: str) -> Plan:
    return planning.plan_of(train.parser(words).parse_args([*words, "--dry-run"]))


def test_options_are_flags_keys_and_defaults_and_a_task_can_show_its_loss_in_its_own_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text("task: {name: 'registered_tasks:Task', width: 3}\n")
    plan = plan_of("--config", "c.yaml", *FLAGS)
    assert (plan.config.task.options, plan.config.training.batch_size) == ({"width": 3}, 2)
    plan = plan_of("task.name=registered_tasks:Task", "task.width=5", *FLAGS)
    assert plan.config.task.options == {"width": 5}
    assert [metric.name for metric in plan.task.metrics] == ["loss", "size"]
    assert registry.schema_of(plan.config.task.name).options.model_fields["width"].default == 4
    plan = plan_of("--task", "registered_tasks:Percent", *FLAGS)
    assert [(metric.name, metric.scale) for metric in plan.task.metrics] == [("loss", 100.0), ("size", 1.0)]
    with pytest.raises(SystemExit):
        train.main(["--task", "registered_tasks:Task", "--help"])
    assert "--width" in capsys.readouterr().out
    plan = plan_of("--task", "registered_tasks:Skips", *FLAGS)
    assert plan.dataset_size.train_samples == 64


@pytest.mark.parametrize(
    ("task", "flags", "words"),
    [
        ("Task", ["--width", "0"], "task.width = '0': must be at least 1"),
        ("Task", ["--widht", "3"], "unknown flag --widht; did you mean --width?"),
        ("Task", ["task.widht=3"], "unknown key task.widht in the command line; did you mean task.width?"),
        ("Task", ["--model", "resnet18"], "--model has no effect on the task registered_tasks:Task: omit it"),
        ("Task", ["--eight-bit-io"], "--eight-bit-io has no effect"),
        ("Clash", [], "its option epochs is a key of the section training; rename it"),
        ("Alias", [], "the flag --num-replicas of its option num_replicas exists already; rename it"),
        ("Switch", [], "the flag --dry-run of its option dry_run exists already; rename it"),
        ("Negated", [], "the flag --no-augment of its option no_augment exists already; rename it"),
        ("OfSummary", [], "the metric 'weights_sha256' is another key of the files of a run; rename it"),
        ("Reserved", [], "the metric 'samples' is another key of the files of a run; rename it"),
        ("Best", [], "best = 'accuracy' is none of its metrics (loss, size)"),
        ("NoTuple", [], 'is no tuple of metrics; write metrics = (raypod.Metric("NAME"),)'),
        ("OfNames", [], "task OfNames: metrics = ('size',) is no tuple of metrics"),
        ("OneName", [], "predictions is a tuple of names; write ('label',)"),
        ("Nested", [], "the entry 'x' of the first sample is a dict"),
        ("Ragged", [], f"training samples 0 and 1 {NO_BATCH} 'x': [4] and [3]; {PAD}"),
        ("RaggedTest", [], f"test samples 0 and 3 {NO_BATCH} entry 0: [4] and [5]; {PAD}"),
        ("Uneven", [], "all arrays must have the same length, but there is x 3, y 4"),
        ("Task", PIPELINE, "no module 'x'"),
        ("Other", [], "is no subclass of raypod.Task"),
        ("Missing", [], "the module registered_tasks has no 'Missing'"),
        ("image-clasification:", [], "write module:function"),
    ],
)
def test_bad_input_is_one_line(task: str, flags: Any, words: str, capsys: Any, tmp_path: Path) -> None:
    assert run(task, *flags) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()
    assert train.main(["--task", "image-clasification"]) == 2
    assert "unknown task 'image-clasification'; did you mean image-classification?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("NoMetric", f"NoMetric.{LINE} returned the metrics 'loss'; they are 'loss'"),
        (
            "LossOnly",
            f"LossOnly.{LINE} returned a 0-d tensor; it must return loss, {{'size': (numerator, denominator)}}",
        ),
        ("LossOnly", "{'size': (numerator, denominator)}, where the loss is a 0-d tensor"),
        ("LossOfSamples", "returned (a tensor of shape [2, 1], a dict); it must return loss, {'size': (num"),
        ("NoNetwork", "NoNetwork: network() must return an nn.Module, and returned None: `return` is missing"),
        ("OfBatch", f"OfBatch.{LINE} cannot be called with the network and x,"),
        ("OfPairs", "the network and 2 tensor(s) of a sample, each an argument: too many positional arguments"),
        ("WholeBatch", "returned a 0-d tensor for 'loss'; sums are tensors with one value per sample, [2], or numbers"),
        ("WholeBatchOfOne", "evaluation_outputs (registered_tasks.py:LINE) returned a tensor of shape [1] for 'loss'"),
        ("NoLoss", "NoLoss.evaluation_outputs (registered_tasks.py:LINE) returned the metrics 'size'; they are 'loss'"),
    ],
)
def test_wrong_outputs_name_the_method_before_the_first_update(
    task: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(task, "--run-dir", "run") == 2
    line = 2 + MODULE.split("\n").index(f"class {task}(Task):")  # of the method
    words = words.replace("LINE", str(line))
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("task", ["OwnLoss", "Penalized"])
def test_the_loss_that_a_task_returns_is_trained_without_a_mark(task: str, tmp_path: Path) -> None:
    flags = ["--num-instances", "1", "--replicas", "2", "--learning-rate", "0.01", "--run-dir", "run"]
    assert run(task, *flags, "--updates", "24", "--lr-schedule", "constant") == 0
    first, *_, last = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert last["loss"] < 0.8 * first["loss"]
    assert task == "OwnLoss" or last["size"] < 0.8 * first["size"]


def test_a_model_with_other_outputs_than_classes_is_an_error_in_the_first_call(capsys: Any) -> None:
    flags = ["--model", "registered_tasks:twelve", "--num-instances", "1", "--replicas", "1", "--run-dir", "run"]
    assert train.main([*flags, *FLAGS]) == 2
    words = "--model registered_tasks:twelve has 12 outputs for an image, and the data set 10 classes"
    assert words in capsys.readouterr().err


def test_a_task_trains_without_a_test_split_and_with_the_attributes_of_its_network(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("OnlyTrain", "--num-instances", "1", "--run-dir", "run") == 0
    assert "NO test samples: nothing will be evaluated" in capsys.readouterr().out
    assert '"test_loss": null' in (tmp_path / "run" / "summary.json").read_text()
    assert run("Lasso", "--num-instances", "1", "--replicas", "1", "--run-dir", "lasso") == 0
    first, second = [json.loads(line) for line in (tmp_path / "lasso" / "metrics.jsonl").read_text().splitlines()]
    assert first["size"] > second["size"] > 0
    assert json.loads((tmp_path / "lasso" / "summary.json").read_text())["test_size"] > 0


def test_the_first_batch_has_the_names_of_the_arrays_and_a_wrong_one_names_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("ByName") == 0
    source = SampleSource("own", ([(torch.zeros(2), torch.ones(3))], None), seed=0)
    first, second = source.first_batch(0)
    assert (first.shape, second.shape) == ((1, 2), (1, 3))
    with pytest.raises(KeyError, match="the batch has no tensor 'x': use numbers, as samples are tuples"):
        source.first_batch(0)["x"]
    assert run("ByWrongName") != 0
    assert "the batch has no tensor 'y': they are x" in capsys.readouterr().err


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
    return raypod.fit(task=task, run_dir=folder, **{**INLINE, **sizes, **flags})


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
    assert (rows[3], len(rows)) == (["3", "3", "3.0", "-3.0", "False"], TEST)


def test_the_parts_of_instances_are_sorted_and_a_task_may_change_the_arrays_that_are_sent_read_only() -> None:
    parts = [{SAMPLE: np.array(own), "x": 10.0 * np.array(own)} for own in ([0, 1, 4, 5], [], [2, 3, 6])]
    found = in_sample_order(parts)
    assert found[SAMPLE].tolist() == list(range(7))
    assert (found["x"] == 10 * found[SAMPLE]).all()
    sent = np.arange(3)
    sent.setflags(write=False)

    def change(predictions: Any) -> Dict[str, Any]:
        predictions["x"] += 1
        return {"total": predictions["x"].sum()}

    task = SimpleNamespace(prediction_metrics=change, prediction_details=change)
    facts: Any = SimpleNamespace(test_metrics=[raypod.Metric("total")])
    assert module.measured(task, facts, {SAMPLE: sent, "x": sent}) == ({"total": 6.0}, {"total": 6})


def test_predictions_are_bounded_and_optimizers_of_other_libraries_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gan(Ordered):
        def configure_optimizers(self) -> Any:
            return []

    refused(r"configure_optimizers has no effect: a compiled model has one optimizer", fit, Gan, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(module, "MAX_BYTES", 1 << 8)
    words = "a sample have 17 bytes .*'pair' 8.*, those of 23 test samples 0 MiB; at most 0 MiB are kept"
    refused(words, fit, Ordered, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Wrong, r"Wrong.evaluation_outputs \(test_task_registry.py:\d+\) returned the predictions 'number'; `pred"),
        (Short, r"Short.evaluation_outputs .* 'pair' is a 0-d tensor; a prediction is a tensor \[2, ...\]"),
        (Nothing, "test_metrics are computed of predictions; name those in `predictions`"),
        (Other, "Other.prediction_metrics returned 'other'; `test_metrics` are 'ordered'"),
    ],
)
def test_wrong_predictions_are_an_error_with_their_place(task: Any, words: str, tmp_path: Path) -> None:
    refused(words, fit, task, tmp_path / "run")
    assert task is Other or not (tmp_path / "run" / "metrics.jsonl").exists()  # before the first update


def test_image_classification_reports_its_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    raypod.fit(run_dir=run, model="tiny", replicas=2, updates=2, **INLINE)
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
    raypod.fit(run_dir=run, **INLINE, **flags)
    assert main(["evaluate", str(run), "--predictions", str(tmp_path / "rows.csv"), "--json"]) == 0
    assert "errors" not in json.loads(capsys.readouterr().out)["details"]
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    wrong = [row for row in rows if row["label"] != row["classes_0"]]
    expected = sorted(wrong, key=lambda row: -float(row["probabilities_0"]))[:4]
    errors = json.loads((run / "test.json").read_text())["errors"]
    found = [(each["sample"], each["label"], each["predicted"]) for each in errors]
    assert found == [tuple(int(row[name]) for name in ("sample", "label", "classes_0")) for row in expected]
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


def test_an_image_that_cannot_be_read_is_left_out_of_the_report(tmp_path: Path, monkeypatch: Any) -> None:
    class Unreadable(SeededSamples):
        def __getitem__(self, key: Any) -> Any:
            raise ReadFailed("OSError: the disk is gone")

    monkeypatch.setattr(image_classification, "SeededSamples", Unreadable)
    flags = {"model": "tiny", "updates": 2, "report_samples": 1}
    with pytest.warns(RuntimeWarning, match="the report has no image of test sample .*: OSError: the disk is gone"):
        raypod.fit(run_dir=tmp_path / "run", **INLINE, **flags)
    (error,) = json.loads((tmp_path / "run" / "test.json").read_text())["errors"]
    assert error["image"] is None


def test_parquet_has_the_same_columns_and_needs_pyarrow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    written: Dict[str, Any] = {}
    parquet = SimpleNamespace(write_table=lambda table, buffer: written.update(table) or buffer.write(b"PAR1"))
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(table=dict))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    check_format(tmp_path / "x.parquet")
    write(tmp_path / "x.parquet", {SAMPLE: np.arange(2), "pair": np.array([[1, 2], [3, 4]])})
    columns = {name: column.tolist() for name, column in written.items()}
    assert columns == {SAMPLE: [0, 1], "pair_0": [1, 3], "pair_1": [2, 4]}
    assert (tmp_path / "x.parquet").read_bytes() == b"PAR1"
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert main(["evaluate", str(tmp_path), "--predictions", "x.parquet"]) == 2
    assert "--predictions x.parquet needs pyarrow, which is not installed: pip" in capsys.readouterr().err


def test_the_numbers_of_a_classifier() -> None:
    labels, predicted = np.array([0, 0, 1, 1, 1, 3]), np.array([0, 1, 1, 1, 0, 1])
    details = raypod.classification_details(labels, predicted, np.array([0.9, 0.55, 0.9, 0.9, 0.55, 0.9]), list("abcd"))
    assert details["confusion"] == [[1, 1, 0, 0], [1, 2, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]]
    assert details["confused"] == [[0, 1, 1], [1, 0, 1], [3, 1, 1]]
    with pytest.raises(ConfigError, match="class 3 has no name; there are 3 names"):
        raypod.classification_details(labels, predicted, names=list("abc"))
    assert (details["per_class"]["precision"][:2], details["per_class"]["recall"][1]) == ([0.5, 0.5], 2 / 3)
    assert math.isnan(details["per_class"]["recall"][2])
    assert [(each["samples"], each["accuracy"]) for each in details["calibration"]] == [(2, 0), (4, 0.75)]
    error = calibration_error(labels, predicted, np.array([0.9, 0.55, 0.9, 0.9, 0.55, 0.9]))
    assert error == pytest.approx(100 * (2 * 0.55 + 4 * 0.15) / 6)
    top = np.array([[1, 0], [1, 2], [0, 2], [0, 1], [1, 3], [3, 0]])
    assert top_accuracy(labels, top) == pytest.approx(100 * 4 / 6)
