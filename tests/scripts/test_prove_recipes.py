"""The recipes of `configs/` train on generated data in the real format; `prove_recipes.py` makes more updates."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Dict, List

import make_cifar
import make_image_folder
import prove_recipes
import pytest

from raypod import train

ROOT = Path(__file__).resolve().parents[2]
ONE = ["--fleet", "inline", "--num-instances", "1", "--replicas", "1", "--device-iterations", "1", "--num-workers", "0"]
FEW: Dict[str, List[str]] = {
    "cifar10-resnet18": ["--batch-size", "8", "--gradient-accumulation", "1", "--learning-rate", "0.02"],
    "imagenet-resnet50-pod4": ["--batch-size", "8", "--gradient-accumulation", "1", "--learning-rate", "0.001"],
}


def test_every_recipe_can_be_proven() -> None:
    assert {f"{name}.yaml" for name in prove_recipes.SMALL} == {path.name for path in (ROOT / "configs").glob("*.yaml")}


@pytest.mark.parametrize("recipe", FEW)
def test_the_loss_of_a_recipe_falls(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if recipe.startswith("imagenet"):
        make_image_folder.write(tmp_path, 24, 4, 4)
        size = ["--image-size", "64"]
    else:
        make_cifar.write(tmp_path, 25, 5, 10)
        size = []
    config = str(ROOT / "configs" / f"{recipe}.yaml")
    flags = ["--config", config, *FEW[recipe], *ONE, *size, "--data-dir", str(tmp_path), "--warmup-updates", "2"]
    flags += [
        "--epochs",
        "1000",
        "--updates",
        "8",
        "--evaluate-every",
        "1000",
        "--no-augment",
        "--run-dir",
        "run",
        "-q",
    ]
    assert train.main(flags) == 0
    losses = prove_recipes.losses_of(tmp_path / "run")
    assert len(losses) == 8
    assert mean(losses[-2:]) < mean(losses[:2])
