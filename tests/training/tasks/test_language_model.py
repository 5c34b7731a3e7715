"""The language model: metrics, parameter groups, short runs, and a decoder that is computed in parts."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any, Dict, List, Tuple

import poptorch
import pytest
import torch
from torch import nn
from torch.nn import functional

from raypod import train
from raypod.api.planning import describe_with_pipeline, plan_from
from raypod.errors import ConfigError
from raypod.events import UpdateDone
from raypod.plan.config import Config
from raypod.plan.resolve import from_values
from raypod.runs.progress import Progress
from raypod.training.checkpoint import writer
from raypod.training.models import program
from raypod.training.models.decoder import SIZES, Decoder
from raypod.training.models.pipeline_table import inspect_pipeline
from raypod.training.tasks.language_model import LanguageModel
from raypod.training.tasks.registry import facts_of, schema_of, task_of

NAME = "language-model"
INLINE = ["--fleet", "inline", "--device", "emulated"]
GENERATED = {"name": "language-model", "generated_windows": 64, "vocabulary": 90, "sequence_length": 16}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("text")
    for index in range(40):
        (folder / f"{index}.txt").write_text("".join(f"{n} and {n + index} are {2 * n + index}. " for n in range(20)))
    return str(folder)


def config(text: str) -> Config:
    return from_values({"task": {"name": NAME, "text": text, "sequence_length": 16}}, schema=schema_of(NAME))


def common(text: str) -> List[str]:
    return ["--task", NAME, "--text", text, "--sequence-length", "16", "--batch-size", "2", "--replicas", "2"]


def run(text: str, folder: Path, *flags: str) -> Dict[str, Any]:
    """Train 2 replicas in this process; return the summary."""
    assert train.main([*common(text), *INLINE, "--run-dir", str(folder), *flags]) == 0
    return json.loads((folder / "summary.json").read_text())


def test_weight_decay_leaves_out_norms_biases_and_embeddings_but_not_tied_ones(text: str) -> None:
    task = task_of(config(text))
    network = task.network(task.example(1))
    decayed, others = task.parameter_groups(network, 0.1)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(others["params"]) == len(names)
    found = {names[id(parameter)] for parameter in decayed["params"]}
    layers = ("attention.qkv", "attention.out", "up", "down")
    assert found == {"head.weight", *(f"blocks.{block}.{layer}.weight" for block in (0, 1) for layer in layers)}
    task = task_of(plan({"tied_embeddings": True, "serialize": 4}).config)
    network = task.network(task.example(1))
    assert network.head.weight is network.embedding.tokens.weight
    assert network.head.weight.shape == (96, 128)  # 90 tokens, in a multiple of 32
    decayed, others = task.parameter_groups(network, 0.1)
    assert any(each is network.head.weight for each in decayed["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(list(network.parameters()))


@torch.no_grad()
def test_the_metrics_are_those_of_torch(text: str) -> None:
    task = LanguageModel(config(text))
    network = nn.Sequential(nn.Embedding(256, 4), nn.Linear(4, 256))
    tokens, num_bytes = torch.randint(0, 256, (3, 17), dtype=torch.int32), torch.tensor([16, 20, 30], dtype=torch.int32)
    targets = tokens[:, 1:].to(torch.int64)
    losses = functional.cross_entropy(network(tokens[:, :-1]).transpose(1, 2), targets, reduction="none")
    loss, ratios = task.training_outputs(network, tokens, num_bytes)
    torch.testing.assert_close(loss, losses.mean())
    torch.testing.assert_close(ratios["bits_per_byte"], (losses.sum(), torch.tensor(66)))
    tested = task.evaluation_outputs(network, tokens, num_bytes)
    torch.testing.assert_close(tested["loss"][0], losses.sum(dim=1))
    metrics = {metric.name: metric for metric in facts_of(task.config).metrics}
    denominators = {"loss": 48, "perplexity": 48, "bits_per_byte": 66}
    for name, (_, denominator) in tested.items():
        assert torch.as_tensor(denominator).expand(3).sum() == denominators[name]
    values = {name: metrics[name].value(tested[name][0].sum().item(), denominators[name]) for name in denominators}
    mean = losses.mean().item()
    expected = {"loss": mean, "perplexity": math.exp(mean), "bits_per_byte": mean / math.log(2) * 48 / 66}
    assert values == pytest.approx(expected, rel=1e-5)


def test_a_run_reports_the_metrics_and_tokens_per_second(text: str, tmp_path: Path, capsys: Any) -> None:
    summary = run(text, tmp_path / "run", "--updates", "40", "--learning-rate", "0.01", "--warmup-updates", "5")
    (evaluation,) = summary["evaluations"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for found in (evaluation, *lines):
        assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=1e-6)
        assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2), rel=1e-6)
    assert summary["test_bits_per_byte"] == evaluation["bits_per_byte"] < 5 < lines[0]["bits_per_byte"]
    assert summary["tokens_per_s"] == pytest.approx(16 * summary["samples_per_s"])
    assert [line["tokens_per_s"] for line in lines] == [16 * line["samples_per_s"] for line in lines]
    assert "Test bits_per_byte: " in capsys.readouterr().out


def test_a_run_resumes_exactly_and_with_the_same_text_only(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "text.txt"
    file.write_text("one two three " * 100)
    flags = ["--lr-schedule", "constant", "--dropout", "0.2", "--gradient-accumulation", "2"]
    flags += ["--device-iterations", "2"]
    whole = run(str(file), tmp_path / "whole", "--updates", "8", *flags)
    run(str(file), tmp_path / "part", "--updates", "4", *flags)
    rest = ["--updates", "8", "--resume", str(tmp_path / "part")]
    resumed = run(str(file), tmp_path / "rest", *flags, *rest)
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["evaluations"][-1] == whole["evaluations"][-1]
    file.write_text("one two four  " * 100)
    assert train.main([*common(str(file)), *INLINE, *flags, *rest]) == 2
    assert "data_fingerprint" in capsys.readouterr().err


def test_the_progress_bar_shows_tokens_per_second(text: str) -> None:
    task = {"name": NAME, "text": text, "sequence_length": 16}
    plan = plan_from({"task": task}, "the test", is_dry=True)
    metrics = {"loss": 0.5, "perplexity": 2.0, "bits_per_byte": 0.75}
    shown = Terminal()
    progress = Progress(plan, io.StringIO(), shown)
    progress.on_event(UpdateDone(1, 1, metrics, 32, 100.0, 1.0, part_rates=plan.task.part_rates(100.0)))
    progress.__exit__()
    assert "loss=0.500, ppl=2.00, bits/byte=0.750, 1600 tokens/s" in shown.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("precision", "numbers"), [("32.32", (1, 2, 4)), ("16.32", (1, 4)), ("16.16", (1, 4))])
def test_the_splits_of_a_pipeline_do_not_change_the_weights(
    text: str, tmp_path: Path, precision: str, numbers: Tuple[int, ...]
) -> None:
    flags = ["--precision", precision, "--gradient-accumulation", "7", "--updates", "2", "--strict"]
    found = [run(text, tmp_path / str(ipus), "--ipus-per-replica", str(ipus), *flags) for ipus in numbers]
    assert len({each["weights_sha256"] for each in found}) == 1
    assert all(math.isfinite(each["test_loss"]) for each in found)


@pytest.mark.parametrize(("balance", "ipus"), [("parameters", 4), ("time", 2)])
def test_the_plan_of_a_pipeline_has_its_stages_and_memory(text: str, balance: str, ipus: int) -> None:
    training = {"gradient_accumulation": 7, "pipeline_balance": balance, "batch_size": 2}
    task = {"name": NAME, "text": text, "sequence_length": 16}
    plan = plan_from({"task": task, "training": training, "pod": {"ipus_per_replica": ipus}}, "the test", is_dry=True)
    described = describe_with_pipeline(plan)
    stages = described["pipeline"]["stages"]
    assert [stage["ipu"] for stage in stages] == list(range(ipus))
    task_network = task_of(plan.config)
    network = task_network.network(task_network.example(1))
    assert sum(stage["parameters"] for stage in stages) == sum(each.numel() for each in network.parameters())
    assert len(described["memory"]) >= 1


def test_the_norm_of_all_gradients_is_clipped(text: str, tmp_path: Path) -> None:
    sgd = ["--optimizer", "sgd", "--momentum", "0", "--learning-rate", "1", "--weight-decay", "0", "--updates", "1"]
    weights = []
    for folder, flags in (("none", []), ("clipped", ["--max-grad-norm", "0.125"])):
        run(text, tmp_path / folder, *sgd, "--warmup-updates", "0", *flags)
        weights.append(weights_of(tmp_path / folder))
    torch.manual_seed(42)
    task = task_of(config(text))
    initial = task.network(task.example(1)).state_dict()
    steps = [torch.cat([(each[name] - initial[name]).flatten() for name in initial]) for each in weights]
    assert steps[0].norm() > 0.25
    assert steps[1].norm().item() == pytest.approx(0.125, rel=1e-3)
    torch.testing.assert_close(steps[1] / steps[1].norm(), steps[0] / steps[0].norm(), atol=1e-3, rtol=0)


def weights_of(folder: Path) -> Dict[str, torch.Tensor]:
    (checkpoint,) = (folder / "checkpoints").glob("update-*")
    return writer.load_checkpoint(checkpoint)["weights"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sequence-length", "1"], "task.sequence_length = '1': must be at least 2"),
        (["--dropout", "1"], "task.dropout = '1': must be less than 1"),
        (["--size", "huge"], "task.size = 'huge': must be 'tiny', 'small', 'gpt2', 'gpt2-medium' or 'gpt2-large'"),
        (["--text", "/no/text"], "--text /no/text does not exist"),
        (["--sequence-length", "9000"], "use a smaller one, or more text"),
        (["--max-grad-norm", "1", "--optimizer", "lamb"], "poptorch.optim.LAMB cannot clip gradients"),
        (["--dataset", "cifar10"], "--dataset has no effect on the task language-model: omit it"),
        (["--norm", "group"], "--norm has no effect on the task language-model: omit it"),
        (["task.lenght=3"], "unknown key task.lenght"),
    ],
)
def test_a_wrong_option_is_one_line_of_error(
    text: str, tmp_path: Path, capsys: Any, flags: list[str], message: str
) -> None:
    given = [] if "--text" in flags else ["--text", text]
    assert train.main(["--task", NAME, *given, "--run-dir", str(tmp_path / "run"), *flags]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="unknown key task.sequence_length"):
        from_values({"task": {"sequence_length": 3}})  # of another task


def test_planning_needs_no_torch(run_python: Any, text: str) -> None:
    run_python(
        "import sys; from raypod.api.planning import plan_from\n"
        f"plan_from({{'task': {{'name': 'language-model', 'text': {text!r}}}}}, 'the test', is_dry=True)\n"
        "assert not {'torch', 'ray'} & set(sys.modules)"
    )


def plan(task: Dict[str, Any], **sections: Any) -> Any:
    return plan_from({"task": {**GENERATED, **task}, **sections}, "the test", is_dry=True)


def decoder(**options: Any) -> Decoder:
    torch.manual_seed(1)
    return Decoder(SIZES["tiny"], 96, 16, **options)


def test_the_loss_and_products_in_parts_equal_whole_ones() -> None:
    tokens = torch.arange(32).view(2, 16) * 3
    results = []
    for parts in (1, 4):
        network = decoder(parts=parts)
        program.split_products(network)
        logits = network(tokens)
        logits.square().sum().backward()
        gradients = [network.embedding.tokens.weight.grad, network.head.weight.grad]
        results.append([logits, *gradients])
    for whole, part in zip(*results):
        assert part is not None
        torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-6)
    assert torch.equal(decoder().embedding.tokens(tokens), decoder(parts=4).embedding.tokens(tokens))
    logits, targets = torch.randn(2, 10, 7), torch.randint(0, 7, (2, 10))
    whole = program.mean_loss(logits, targets, None)
    torch.testing.assert_close(program.mean_loss(logits, targets, 4), whole)


def test_the_output_layer_is_a_serialized_product_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def product(lhs: torch.Tensor, rhs: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append((options["factor"], options["mode"], tuple(rhs.shape)))
        return lhs @ rhs

    monkeypatch.setattr(poptorch, "serializedMatMul", product)
    network = decoder(parts=4)
    program.split_products(network)
    network(torch.zeros(1, 16, dtype=torch.int32))
    assert calls == [(4, poptorch.MatMulSerializationMode.OutputChannels, (128, 96))]


def test_generated_windows_are_random_tokens_of_the_seed() -> None:
    config = plan({}).config
    sources = [task_of(config).load() for _ in range(2)]
    assert sources[0].fingerprint == sources[1].fingerprint
    assert (len(sources[0].train), len(sources[0].test), facts_of(config).size.train_samples) == (64, 3, 64)
    tokens = sources[0].train.text.tokens
    assert 80 < tokens.max() < 90
    for options in ({"text": "."}, {"tokenizer": "x"}):
        with pytest.raises(ConfigError, match="has no effect on --generated-windows"):
            plan(options)
    with pytest.raises(ConfigError, match="--vocabulary 90 has no effect without --generated-windows"):
        plan({"generated_windows": None, "text": "."})


def test_the_estimate_of_a_tied_decoder_in_parts() -> None:
    pod = {"ipus_per_replica": 4, "replicas": 1, "num_instances": 1}
    training = {"layers_per_ipu": "0,1,1,0", "gradient_accumulation": 9, "batch_size": 1, "precision": "16.16"}
    found = []
    for options in ({}, {"serialize": 8, "loss_tokens": 4}):
        task = {"vocabulary": 4096, "tied_embeddings": True, "sequence_length": 32, **options}
        made = plan(task, training=training, pod=pod)
        assert made.pipeline_splits == ("blocks.0", "blocks.1", "norm", "head=0")
        inspected = inspect_pipeline(made, task_of(made.config))
        assert [stage.ipu for stage in inspected.stages] == [0, 1, 2, 3, 0]
        network = task_of(made.config).network(task_of(made.config).example(1))
        expected = sum(each.numel() for each in network.parameters())
        assert sum(stage.parameters for stage in inspected.stages) == expected
        found.append(inspected.memory[0].activations)
    assert found[1] < 0.7 * found[0]
