from __future__ import annotations

import pytest

from raypod.errors import ConfigError
from raypod.plan import resolve
from raypod.plan.config import Config, fields
from raypod.plan.values import Interval, parse_interval


@pytest.mark.parametrize(
    ("text", "interval", "updates", "seconds"),
    [
        ("100 updates", Interval(100, "update"), 100, float("inf")),
        ("1 epoch", Interval(1, "epoch"), 44, float("inf")),
        ("0.5 minutes", Interval(0.5, "minute"), 0, 30),
    ],
)
def test_an_interval_is_in_updates_epochs_or_minutes(
    text: str, interval: Interval, updates: int, seconds: float
) -> None:
    assert parse_interval(text) == interval
    assert (interval.updates(44), interval.seconds) == (updates, seconds)


@pytest.mark.parametrize(
    ("text", "words"),
    [("often", "a number and its unit"), ("0 minutes", "positive"), ("1.5 epochs", "a whole number of epochs")],
)
def test_a_wrong_interval_is_an_error(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_interval(text)


def test_a_config_is_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().training.seed = 3  # type: ignore[misc]


def test_all_keys() -> None:
    """A new key must be added here, and to the documentation."""
    keys = [key for _, key, _ in fields()]
    assert len(keys) == len(set(keys)), "flags have no section, so keys must be unique over all sections"
    assert " ".join(keys) == (
        "name dataset data_dir download cache_dir samples image classes augment crop_padding flip image_size "
        "jpeg_decoder num_workers async_dataloader eight_bit_io "
        "model stem norm pipeline_splits pipeline_balance execution "
        "precision memory_format batch_size gradient_accumulation device_iterations epochs updates optimizer "
        "learning_rate lr_schedule lr_floor lr_power lr_steps lr_gamma warmup_updates init_weights init_ignore freeze "
        "ema momentum weight_decay max_grad_norm loss_scaling reduction "
        "label_smoothing evaluate_every early_stopping early_stopping_metric evaluation_iterations seed "
        "replicas num_instances ipus_per_replica num_ipus threads_per_replica bind_cores cluster wait_hosts "
        "elastic min_hosts executable_cache_path "
        "device fleet collectives strict run_dir resume resume_anyway checkpoint_every keep_checkpoints "
        "checkpoint_copies storage_path storage_timeout_s keep_remote best_metric "
        "on_nonfinite status_port profile trackers tracker_artifacts tracker_timeout_s tensorboard "
        "save_timeout_s start_timeout_s report_timeout_s stop_timeout_s "
        "max_restarts dead_after_s silent_after_s stuck_after_s preemption_grace_s preemption_exit_code"
    )


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("run", "run_dir", "", "must not be empty"),
        ("run", "resume", " ", "must not be empty"),
        ("pod", "cluster", "", "must not be empty"),
        ("training", "batch_size", True, "must not be a boolean"),
        ("training", "learning_rate", True, "must not be a boolean"),
        ("training", "batch_size", 0, "^training.batch_size = 0: must be at least 1$"),
        ("training", "epochs", "x", "^training.epochs = 'x': must be a whole number$"),
        ("training", "learning_rate", "fast", "learning_rate = 'fast': must be a number$"),
        ("training", "precision", "8.8", "precision = '8.8': must be '16.16', '16.32' or '32.32'$"),
        ("data", "augment", "maybe", "augment = 'maybe': must be true or false$"),
        ("data", "image", "3x32x32\n", "must be channels x height x width"),
        ("data", "image", "3x3", "image = '3x3': must be channels x height x width, as in 3x32x32$"),
        ("training", "lr_steps", [True], "must be a list of numbers"),
        ("training", "lr_steps", [30, 10], "must be in ascending order"),
        ("training", "lr_steps", "10,,20", "without empty entries"),
        ("training", "lr_steps", [], "without empty entries"),
        ("training", "pipeline_splits", "a,", "without empty entries"),
        ("training", "pipeline_splits", ["a", "a"], "a is listed twice"),
        ("training", "momentum", float("nan"), "= nan: must be less than 1$"),
        *(
            ("training", key, float("nan"), "= nan: must be a finite number$")
            for key in ("weight_decay", "learning_rate")
        ),
        *(("run", key, "inf", "= 'inf': must be at most 1000000$") for key in ("start_timeout_s", "stuck_after_s")),
        *(("run", key, -1, "= -1: must be greater than 0$") for key in ("start_timeout_s", "stuck_after_s")),
    ],
)
def test_values_without_a_meaning_are_errors(section: str, key: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve.from_values({section: {key: value}})
