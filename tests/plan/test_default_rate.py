"""The default learning rate: by the optimizer, scaled with the global batch, and stated in the plan."""

from __future__ import annotations

from typing import Any, Dict

import pytest

from raypod.__main__ import main
from raypod.plan.config import Config
from raypod.plan.learning_rate import DEFAULT_RATES
from raypod.plan.resolve import NO_SCHEMA, Schema, from_values
from raypod.training.tasks.registry import schema_of


def rate(training: Dict[str, Any], schema: Schema = NO_SCHEMA, **pod: Any) -> float:
    return from_values({"training": training, "pod": pod}, schema=schema).training.learning_rate


def test_the_default_run_has_its_rate() -> None:
    assert rate({}) == Config().training.learning_rate == DEFAULT_RATES["sgd"]


@pytest.mark.parametrize(
    ("training", "pod", "expected"),
    [
        ({"batch_size": 16}, {}, 0.2),
        ({"batch_size": 1}, {"replicas": 1, "num_instances": 1}, 0.1 / 32),
        ({"gradient_accumulation": 2}, {"replicas": 2}, 0.1),
        ({"batch_size": 1024}, {}, 0.4),
        ({"optimizer": "adam"}, {}, 1e-3),
        ({"optimizer": "lamb", "batch_size": 16}, {}, 2e-2),
        ({"optimizer": "rmsprop"}, {"num_ipus": 8}, 2e-3),
        ({"reduction": "sum"}, {}, 0.025),
        ({"reduction": "sum", "optimizer": "adamw"}, {}, 1e-3),
        ({"batch_size": 16, "learning_rate": 0.1}, {}, 0.1),
    ],
)
def test_the_rate_follows_the_optimizer_and_the_global_batch(training: Any, pod: Any, expected: float) -> None:
    assert rate(training, **pod) == pytest.approx(expected)


def test_rates_of_other_tasks() -> None:
    language_model = schema_of("language-model")
    assert rate({}, language_model) == 2e-3
    assert rate({"batch_size": 16}, language_model) == pytest.approx(4e-3)
    assert rate({"optimizer": "sgd"}, language_model) == pytest.approx(0.003125)
    most = rate({"optimizer": "sgd", "batch_size": 1024}, language_model)
    assert most == pytest.approx(0.0125), "gpt2 diverges with 0.05, a decoder of 6 layers with 0.2"
    assert rate({"optimizer": "rmsprop", "batch_size": 1024}, language_model) == pytest.approx(5e-4)
    assert rate({"optimizer": "lamb"}, schema_of("hf-causal-lm")) == pytest.approx(5e-4)
    own = Schema(defaults={"training.learning_rate": 0.02}, scales_rate=False)
    assert rate({"batch_size": 64, "optimizer": "adam"}, own) == 0.02, "what a task of the user says holds"
    assert rate({"batch_size": 16}, Schema(scales_rate=False)) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "0.1 (cosine, 20 updates of warm-up)"),
        (["--batch-size", "16"], "0.2 (linear scaling of 0.1 for 32 samples per update; cosine"),
        (["--batch-size", "16", "--learning-rate", "0.2"], "0.2 (cosine, "),
        (["--batch-size", "64"], "0.4 (linear scaling of 0.1 for 32 samples per update, at most 4-fold; cosine"),
        (["--task", "language-model", "--batch-size", "4"], "0.001 (linear scaling of 0.002 for 32 samples per"),
        (["--lr-schedule", "constant", "--warmup-updates", "1"], "0.1 (constant, 1 update of warm-up)"),
    ],
)
def test_the_plan_states_the_scaling(words: Any, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 0
    (row,) = [each for each in capsys.readouterr().out.splitlines() if each.strip().startswith("optimizer")]
    assert f"learning rate {line}" in row


@pytest.mark.parametrize("training", [{"batch_size": "many"}, {"batch_size": 0}, {"optimizer": "none"}])
def test_values_that_cannot_be_used_are_their_own_error(training: Any) -> None:
    with pytest.raises(Exception, match=f"training.{next(iter(training))} = "):
        rate(training)
