"""Tasks by name, their options, and what is rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from raypod import train
from raypod.api import planning
from raypod.plan.plan import Plan
from raypod.training.data.samples import SampleSource
from raypod.training.tasks import registry

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
    def network(self, first_batch):
        return nn.Linear(first_batch[0].shape[1], 1)
    def training_outputs(self, network, x):
        return nn.functional.mse_loss(network(x), x[:, :1]), {"size": (x.abs().sum(), x.numel())}
    def evaluation_outputs(self, network, x):
        return {"loss": ((network(x) - x[:, :1]).squeeze(1) ** 2, 1), "size": (x.abs().sum(1), x.shape[1])}
class Clash(Task):
    class Options(raypod.TaskOptions):
        epochs: int = Field(1, description="clashes with training.epochs")
class Alias(Task):
    class Options(raypod.TaskOptions):
        num_replicas: int = Field(1, description="has the flag of pod.replicas")
class Switch(Task):
    class Options(raypod.TaskOptions):
        dry_run: bool = Field(False, description="has a flag of the command")
class Negated(Task):
    class Options(raypod.TaskOptions):
        no_augment: int = Field(0, description="has the flag of data.augment = false")
class OfSummary(Task):
    metrics = (raypod.Metric("weights_sha256"),)
class Percent(Task):
    metrics = (raypod.Metric("size"), raypod.Metric("loss", scale=100.0, unit="%"))
class Reserved(Task):
    metrics = (raypod.Metric("samples"),)
class Best(Task):
    best = "accuracy"
class NoMetric(Task):
    def training_outputs(self, network, x):
        return nn.functional.mse_loss(network(x), x[:, :1]), {}
class LossOnly(Task):
    def training_outputs(self, network, x):
        return nn.functional.mse_loss(network(x), x[:, :1])
class LossOfSamples(Task):
    def training_outputs(self, network, x):
        return nn.functional.mse_loss(network(x), x[:, :1], reduction="none"), {"size": (1, 1)}
class OwnLoss(Task):
    def training_outputs(self, network, x):
        return (network(x) - x[:, :1]).square().mean(), {"size": (1, 1)}
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
    def network(self, first_batch):
        nn.Linear(first_batch[0].shape[1], 1)
class OfBatch(Task):
    def training_outputs(self, network, batch):
        return nn.functional.mse_loss(network(batch), batch[:, :1]), {"size": (1, 1)}
class OfPairs(Task):
    def datasets(self):
        return [(torch.zeros(4), torch.zeros(1))] * 64, None
class NoTuple(Task):
    metrics = raypod.Metric("size")
class OfNames(Task):
    metrics = ("size",)
class OneName(Task):
    predictions = ("label")
class NoLoss(Task):
    def evaluation_outputs(self, network, x):
        return {"size": (x.abs().sum(1), x.shape[1])}
class Nested(Task):
    def datasets(self):
        return [{"x": {"y": 1}}] * 64, None
class ByName(Task):
    def network(self, first_batch):
        assert first_batch["x"] is first_batch[0] and len(first_batch) == 1
        return nn.Linear(first_batch["x"].shape[1], 1)
class ByWrongName(Task):
    def network(self, first_batch):
        return nn.Linear(first_batch["y"].shape[1], 1)
class Ragged(Task):
    def datasets(self):
        return [{"x": torch.zeros(4)}, *[{"x": torch.zeros(i % 3 + 3)} for i in range(63)]], None
class RaggedTest(Task):
    def datasets(self):
        return [(torch.zeros(4),)] * 64, [(torch.zeros(4),)] * 3 + [(torch.zeros(5),)]
class Unreadable(list):
    def __getitem__(self, index):
        if index == 63:
            raise OSError("damaged")
        return super().__getitem__(index)
class Skips(Task):
    def datasets(self):
        return Unreadable([(torch.zeros(4),)] * 64), None
class Uneven(Task):
    def datasets(self):
        return raypod.Arrays(x=torch.zeros(3), y=torch.zeros(4)), None
class OnlyTrain(Task):
    def datasets(self):
        return [(torch.full((4,), float(i)),) for i in range(64)], None
class Other: pass
def twelve(channels, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64 * channels, 12))
"""
PIPELINE = ["--ipus-per-replica", "2", "--gradient-accumulation", "3", "--pipeline-splits", "x"]
FLAGS = ["--fleet", "inline", "--updates", "2", "--device", "emulated"]


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "registered_tasks.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def run(task: str, *flags: str) -> int:
    return train.main(["--task", task if ":" in task else f"registered_tasks:{task}", *FLAGS, *flags])


def plan_of(*words: str) -> Plan:
    return planning.plan_of(train.parser(words).parse_args([*words, "--dry-run"]))


def test_options_are_flags_keys_and_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("task: {name: 'registered_tasks:Task', width: 3}\n")
    plan = plan_of("--config", "c.yaml", *FLAGS)
    assert (plan.config.task.options, plan.config.training.batch_size) == ({"width": 3}, 2)
    plan = plan_of("task.name=registered_tasks:Task", "task.width=5", *FLAGS)
    assert plan.config.task.options == {"width": 5}
    assert [metric.name for metric in plan.task.metrics] == ["loss", "size"]
    assert registry.schema_of(plan.config.task.name).options.model_fields["width"].default == 4


def test_a_task_can_show_its_loss_in_its_own_way_and_help_lists_its_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = plan_of("--task", "registered_tasks:Percent", *FLAGS)
    assert [(metric.name, metric.scale) for metric in plan.task.metrics] == [("loss", 100.0), ("size", 1.0)]
    with pytest.raises(SystemExit):
        train.main(["--task", "registered_tasks:Task", "--help"])
    assert "--width" in capsys.readouterr().out


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
        (
            "Ragged",
            [],
            "training samples 0 and 1 cannot be combined to a batch: 'x': [4] and [3]; resize or pad "
            "them in the data set, or by a line of the task, `collate = raypod.pad_collate(64, 128)`",
        ),
        (
            "RaggedTest",
            [],
            "test samples 0 and 3 cannot be combined to a batch: entry 0: [4] and [5]; resize or pad them",
        ),
        ("Uneven", [], "all arrays must have the same length, but there is x 3, y 4"),
        ("Task", PIPELINE, "no module 'x'"),
        ("Other", [], "is no subclass of raypod.Task"),
        ("Missing", [], "the module registered_tasks has no 'Missing'"),
        ("image-clasification:", [], "write module:function"),
    ],
)
def test_bad_input_is_one_line(
    task: str, flags: Any, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
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
        (
            "NoMetric",
            "NoMetric.training_outputs (registered_tasks.py:LINE) returned the metrics 'loss'; they are 'loss'",
        ),
        (
            "LossOnly",
            "LossOnly.training_outputs (registered_tasks.py:LINE) returned a 0-d tensor; it must return loss, "
            "{'size': (numerator, denominator)}, where the loss is a 0-d tensor",
        ),
        ("LossOfSamples", "returned (a tensor of shape [2, 1], a dict); it must return loss, {'size': (num"),
        ("NoNetwork", "NoNetwork: network() must return an nn.Module, and returned None: `return` is missing"),
        ("OfBatch", "OfBatch.training_outputs (registered_tasks.py:LINE) cannot be called with the network and x,"),
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


def test_a_model_with_other_outputs_than_classes_is_an_error_in_the_first_call(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--model", "registered_tasks:twelve", "--num-instances", "1", "--replicas", "1", "--run-dir", "run"]
    assert train.main([*flags, *FLAGS]) == 2
    words = "--model registered_tasks:twelve has 12 outputs for an image, and the data set 10 classes"
    assert words in capsys.readouterr().err


def test_a_task_of_tuples_without_a_test_split_trains(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("OnlyTrain", "--num-instances", "1", "--run-dir", "run") == 0
    assert "NO test samples: nothing will be evaluated" in capsys.readouterr().out
    assert '"test_loss": null' in (tmp_path / "run" / "summary.json").read_text()


def test_the_network_of_a_task_has_the_attributes_of_its_module(tmp_path: Path) -> None:
    assert run("Lasso", "--num-instances", "1", "--replicas", "1", "--run-dir", "run") == 0
    first, second = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert first["size"] > second["size"] > 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["test_size"] > 0


def test_the_first_batch_has_the_names_of_the_arrays() -> None:
    assert run("ByName") == 0
    source = SampleSource("own", ([(torch.zeros(2), torch.ones(3))], None), seed=0)
    first, second = source.first_batch(0)
    assert (first.shape, second.shape) == ((1, 2), (1, 3))
    with pytest.raises(KeyError, match="the batch has no tensor 'x': use numbers, as samples are tuples"):
        source.first_batch(0)["x"]


def test_a_wrong_name_of_a_tensor_names_the_right_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ByWrongName") != 0
    assert "the batch has no tensor 'y': they are x" in capsys.readouterr().err


def test_a_sample_that_cannot_be_read_is_no_reason_not_to_plan() -> None:
    plan = plan_of("--task", "registered_tasks:Skips", *FLAGS)
    assert plan.dataset_size.train_samples == 64
