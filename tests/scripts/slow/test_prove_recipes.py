"""The recipes of `configs/` train on generated data in the real format; `prove_recipes.py` makes more updates."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any, Dict

import make_cifar
import make_image_folder
import prove_recipes
import pytest

from raypod import train
from tests.support import ROOT

ONE = ["--fleet", "inline", "--num-instances", "1", "--replicas", "1", "--device-iterations", "1", "--num-workers", "0"]
ONE += ["--batch-size", "8", "--gradient-accumulation", "1", "--warmup-updates", "2", "--epochs", "1000", "--updates"]
ONE += ["8", "--evaluate-every", "1000", "--no-augment", "--run-dir", "run", "-q"]
RATES: Dict[str, str] = {"cifar10-resnet18": "0.02", "imagenet-resnet50-pod4": "0.001"}


def test_every_recipe_can_be_proven() -> None:
    assert {f"{name}.yaml" for name in prove_recipes.SMALL} == {path.name for path in (ROOT / "configs").glob("*.yaml")}


@pytest.mark.parametrize("recipe", RATES)
def test_the_loss_of_a_recipe_falls(processes: None, recipe: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--config", str(ROOT / "configs" / f"{recipe}.yaml"), "--data-dir", str(tmp_path)]
    if recipe.startswith("imagenet"):
        make_image_folder.write(tmp_path, 24, 4, 4)
        flags += ["--image-size", "64"]
    else:
        make_cifar.write(tmp_path, 25, 5, 10)
    assert train.main([*flags, *ONE, "--learning-rate", RATES[recipe]]) == 0
    losses = prove_recipes.losses_of(tmp_path / "run")
    assert len(losses) == 8
    assert mean(losses[-2:]) < mean(losses[:2])
