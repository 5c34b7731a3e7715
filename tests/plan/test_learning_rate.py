"""Learning rates of every schedule, the default rate, and what is rejected before a run."""

from __future__ import annotations

import math
import sys
from typing import Any, Dict, List

import pytest
import torch

from raypod.__main__ import main
from raypod.api import planning
from raypod.errors import ConfigError
from raypod.plan import flags, resolve, user_code
from raypod.plan.config import Config
from raypod.plan.learning_rate import DEFAULT_RATES, RunFacts, check_function, learning_rate, loss_scaling
from raypod.plan.resolve import NO_SCHEMA, Schema, from_values
from raypod.system.command_line import FlagParser
from raypod.training.checkpoint.resume import LENGTH, settings_of
from raypod.training.tasks.registry import schema_of

UPDATES, EXPONENTIAL = 40, {"lr_schedule": "exponential", "lr_gamma": 0.9}
INITIAL = "--initial-loss-scaling 3"
KNOWN = "known are constant, step, exponential, linear, cosine, polynomial, range-test, or module:function"


def half(update: int, total_updates: int) -> float:
    return 0.5 if update < total_updates / 2 else 0.25


def by_epoch(update: int, total_updates: int, facts: RunFacts) -> float:
    return 1 / (1 + update // facts.updates_per_epoch)


def fails(update: int, total_updates: int) -> float:
    raise RuntimeError("no rate")


def negative_at_the_end(update: int, total_updates: int) -> float:
    return 1.0 if update + 1 < total_updates else -1.0


def not_a_number(update: int, total_updates: int) -> float:
    return math.nan


def of_too_much(update: int, total: int, facts: RunFacts, more: int) -> float:
    return 1.0


def rate(update: int, **training: object) -> float:
    config = from_values({"training": {"learning_rate": 1.0, **training}})
    return learning_rate(config, update, UPDATES, updates_per_epoch=10)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"lr_schedule": "constant"}, {0: 0.25, 2: 0.75, 3: 1.0, 39: 1.0}),
        ({"lr_schedule": "cosine"}, {0: 0.25, 3: 1.0, 39: 0.5 * (1 + -0.9963974885425265)}),
        ({"lr_schedule": "step", "lr_steps": [2, 3], "lr_gamma": 0.5}, {3: 1.0, 19: 1.0, 20: 0.5, 29: 0.5, 30: 0.25}),
        ({**EXPONENTIAL, "lr_frequency": 2}, {0: 0.25, 4: 1.0, 5: 0.9**0.4, 9: 0.9**0.4}),
        ({**EXPONENTIAL, "lr_frequency": 0.5}, {19: 1.0, 20: 0.9**0.85, 39: 0.9**0.85}),
        ({"lr_schedule": "step", "lr_steps": [2], "lr_gamma": 0.5, "lr_frequency": 0.3}, {33: 1.0, 34: 0.5}),
        ({"lr_schedule": "range-test"}, {0: 0.25e-6, 13: 1e-4, 39: 1.0}),
        ({"lr_schedule": f"{__name__}:half"}, {0: 0.125, 3: 0.5, 19: 0.5, 20: 0.25}),
        ({"lr_schedule": f"{__name__}:by_epoch"}, {3: 1.0, 9: 1.0, 10: 0.5, 39: 0.25}),
    ],
)
def test_learning_rates(schedule: Dict[str, object], expected: Dict[int, float]) -> None:
    assert {update: rate(update, warmup_updates=3, **schedule) for update in expected} == pytest.approx(expected)
    own = f"{__name__}:half"  # without a warm-up by default
    assert (rate(0, lr_schedule=own), rate(0, lr_schedule=own, warmup_updates=1)) == (0.5, 0.25)


@pytest.mark.parametrize("name", ["range-test", "raypod.cli.lr_range:factor", "raypod.commands.lr_range:factor"])
def test_a_range_test_names_no_module_and_has_no_warmup(name: str) -> None:
    training = from_values({"training": {"lr_schedule": name}}).training
    assert (training.lr_schedule, rate(0, lr_schedule=training.lr_schedule)) == ("range-test", pytest.approx(1e-6))


def test_the_rate_changes_at_its_steps_and_the_loss_scaling_doubles_at_equal_intervals() -> None:
    for frequency, period in ((1, 10), (2.5, 4), (10, 1), (40, 1)):
        every_update = [rate(update, warmup_updates=0) for update in range(UPDATES)]
        found = [rate(update, warmup_updates=0, lr_frequency=frequency) for update in range(UPDATES)]
        assert found == [every_update[update // period * period] for update in range(UPDATES)]

    def scalings(**training: float) -> List[float]:
        config = from_values({"training": {"loss_scaling": 128, **training}})
        return [loss_scaling(config.training, epoch) for epoch in range(config.training.epochs)]

    assert scalings(epochs=100, initial_loss_scaling=16) == [16] * 25 + [32] * 25 + [64] * 25 + [128] * 25
    assert scalings(epochs=9, initial_loss_scaling=16) == [16] * 2 + [32] * 2 + [64] * 2 + [128] * 3
    assert scalings(epochs=3, initial_loss_scaling=128) == scalings(epochs=3) == [128] * 3


@pytest.mark.parametrize(
    ("schedule", "peer", "options"),
    [
        ({"lr_schedule": "linear"}, "LinearLR", (1.0, 0.0, UPDATES)),
        ({"lr_schedule": "linear", "lr_floor": 0.1}, "LinearLR", (1.0, 0.1, UPDATES)),
        ({"lr_schedule": "cosine", "lr_floor": 0.2}, "CosineAnnealingLR", (UPDATES, 0.2)),
        ({"lr_schedule": "polynomial", "lr_power": 2.5}, "PolynomialLR", (UPDATES, 2.5)),
        (EXPONENTIAL, "ExponentialLR", (0.9**0.1,)),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_schedules_equal_those_of_torch(schedule: Dict[str, object], peer: str, options: Any) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = getattr(torch.optim.lr_scheduler, peer)(optimizer, *options)
    for update in range(UPDATES):
        assert rate(update, warmup_updates=0, **schedule) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9)
        scheduler.step()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--lr-schedule cosin", KNOWN),
        ("--lr-schedule no_such_module:rate", "no_such_module"),
        (f"--lr-schedule {__name__}:missing", "has no 'missing'"),
        (f"--lr-schedule {__name__}:negative_at_the_end", "returned -1.0 for update 7 of 8"),
        (f"--lr-schedule {__name__}:not_a_number", "returned nan for update 0 of 8"),
        (f"--lr-schedule {__name__}:fails", r"at update 0: RuntimeError: no rate \(test_lea.*py:\d+, in fails\)"),
        (f"--lr-schedule {__name__}:of_too_much", "takes .*more"),
        ("--lr-floor 1.5", "must be at most 1"),
        ("--lr-floor 0.1 --lr-schedule constant", "--lr-floor has no effect on --lr-schedule constant"),
        ("--lr-power 2", "--lr-power has no effect on --lr-schedule cosine"),
        ("--lr-frequency 2 --lr-schedule range-test", "--lr-frequency has no effect on --lr-schedule range-test"),
        ("--lr-frequency 2 --lr-schedule constant", "--lr-frequency has no effect on --lr-schedule constant"),
        (f"{INITIAL} --loss-scaling 8", f"{INITIAL} must reach --loss-scaling 8 by doubling"),
        ("--initial-loss-scaling 8", "--initial-loss-scaling 8 must reach --loss-scaling 1 by doubling"),
        ("--initial-loss-scaling 1 --loss-scaling 8 --epochs 3", "needs 4 epochs .* and there are 3"),
        ("--lr-power 0 --lr-schedule polynomial", "greater than 0"),
    ],
)
def test_a_wrong_schedule_is_one_line_before_the_run(given: str, message: str) -> None:
    parser = FlagParser()
    flags.add_flags(parser)
    with pytest.raises(ConfigError, match=message) as error:
        planning.plan_from(*resolve.merge(parser.parse_args(["--updates", "8", *given.split()])))
    assert "\n" not in str(error.value)


def test_a_function_is_imported_once_per_plan_and_resuming_compares_the_length_of_its_schedule(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for schedule in ("linear", "cosine", "polynomial", f"{__name__}:half"):
        assert settings_of(make(training={"lr_schedule": schedule, "updates": 8}))[LENGTH] == 8
        assert settings_of(make(training={"lr_schedule": "constant", "updates": 8}))[LENGTH] is None
    name, import_name = f"{__name__}:half", user_code.import_name
    imported: List[str] = []
    monkeypatch.setattr(user_code, "import_name", lambda name, key: imported.append(name) or import_name(name, key))
    config = from_values({"training": {"lr_schedule": name, "learning_rate": 1.0}})
    for number, factor in enumerate((0.5, 2.0), start=1):
        check_function(config, UPDATES, updates_per_epoch=10)
        assert [rate(update, lr_schedule=name) for update in range(3)] == [factor] * 3
        assert imported == [name] * number
        monkeypatch.setattr(sys.modules[__name__], "half", lambda update, total_updates: 2.0)


def default_rate(training: Dict[str, Any], schema: Schema = NO_SCHEMA, **pod: Any) -> float:
    return from_values({"training": training, "pod": pod}, schema=schema).training.learning_rate


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
    assert default_rate(training, **pod) == pytest.approx(expected)


def test_rates_of_the_default_run_and_of_other_tasks() -> None:
    assert default_rate({}) == Config().training.learning_rate == DEFAULT_RATES["sgd"]
    for wrong in ({"batch_size": "many"}, {"batch_size": 0}, {"optimizer": "none"}):  # each is its own error
        with pytest.raises(Exception, match=f"training.{next(iter(wrong))} = "):
            default_rate(wrong)
    language_model = schema_of("language-model")
    assert default_rate({}, language_model) == 2e-3
    assert default_rate({"batch_size": 16}, language_model) == pytest.approx(4e-3)
    assert default_rate({"optimizer": "sgd"}, language_model) == pytest.approx(0.003125)
    most = default_rate({"optimizer": "sgd", "batch_size": 1024}, language_model)
    assert most == pytest.approx(0.0125), "gpt2 diverges with 0.05, a decoder of 6 layers with 0.2"
    assert default_rate({"optimizer": "rmsprop", "batch_size": 1024}, language_model) == pytest.approx(5e-4)
    assert default_rate({"optimizer": "lamb"}, schema_of("hf-causal-lm")) == pytest.approx(5e-4)
    own = Schema(defaults={"training.learning_rate": 0.02}, scales_rate=False)
    assert default_rate({"batch_size": 64, "optimizer": "adam"}, own) == 0.02, "what a task of the user says holds"
    assert default_rate({"batch_size": 16}, Schema(scales_rate=False)) == pytest.approx(0.2)


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
