"""The settings that have no effect with the others."""

from __future__ import annotations

from typing import Any, Dict, Set

import pytest

from raypod.plan import compatibility
from raypod.plan.config import Config


def flat(**changes: Any) -> Dict[str, Any]:
    """Return the default settings by full name, with changes as in `data__dataset="synthetic"`."""
    sections = Config().model_dump()
    found = {f"{section}.{key}": value for section, content in sections.items() for key, value in content.items()}
    return {**found, **{name.replace("__", "."): value for name, value in changes.items()}}


@pytest.mark.parametrize(
    ("changes", "shown", "left_out"),
    [
        ({}, {"training.momentum", "training.lr_floor"}, {"data.classes", "data.samples", "training.lr_gamma"}),
        ({"data__dataset": "imagefolder"}, {"data.jpeg_decoder", "data.data_dir"}, {"data.classes", "data.image"}),
        ({"data__dataset": "synthetic"}, {"data.classes", "data.image", "data.samples"}, {"data.download"}),
        ({"data__dataset": "my:data"}, {"data.classes"}, {"data.samples", "data.jpeg_decoder"}),
        ({"training__optimizer": "adam"}, set(), {"training.momentum"}),
        ({"training__lr_schedule": "step"}, {"training.lr_steps", "training.lr_gamma"}, {"training.lr_floor"}),
        ({"data__augment": False}, {"data.augment"}, {"data.flip", "data.crop_padding"}),
        ({"run__trackers": ("wandb",)}, {"run.tracker_timeout_s"}, {"run.storage_timeout_s", "run.reset_timeout_s"}),
        ({"run__storage_path": "/s"}, {"run.storage_timeout_s", "run.keep_remote"}, {"run.tracker_artifacts"}),
        ({"data__dataset": "imagefolder"}, {"data.policy"}, {"data.rand_augment_ops", "data.cutmix_disable_prob"}),
        ({"data__dataset": "imagefolder", "data__policy": "rand-augment"}, {"data.rand_augment_magnitude"}, set()),
        ({"task__name": "my:Task"}, {"data.num_workers"}, {"training.model", "data.dataset", "data.jpeg_decoder"}),
    ],
)
def test_settings_without_an_effect_are_left_out(changes: Dict[str, Any], shown: Set[str], left_out: Set[str]) -> None:
    names = set(compatibility.with_effect(flat(**changes)))
    assert shown <= names
    assert not left_out & names


def test_the_names_exist_and_a_config_without_the_deciding_setting_is_shown() -> None:
    assert {*compatibility.IMAGE_KEYS, *compatibility._NEEDS} <= set(flat())
    assert {deciding for deciding, _ in compatibility._NEEDS.values()} <= set(flat())
    assert compatibility.with_effect({"data.classes": 10, "run.tracker_timeout_s": 1}) == {
        "data.classes": 10,
        "run.tracker_timeout_s": 1,
    }
