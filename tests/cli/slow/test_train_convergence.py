"""Trainings reach their accuracy: the digits recipe, and a ResNet-18 on images in CIFAR's format."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Dict

import pytest

from raypod import train
from tests.support import ROOT


def summary_of(folder: Path, *flags: str) -> Dict[str, Any]:
    inline = ["--fleet", "inline", "--num-instances", "1", "--device", "emulated", "--run-dir", str(folder)]
    assert train.main([*inline, *flags]) == 0
    summary: Dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def test_six_epochs_of_the_digits_recipe_in_half_precision(tmp_path: Path) -> None:
    recipe = str(ROOT / "configs" / "digits.yaml")
    summary = summary_of(tmp_path / "run", "--config", recipe, "--epochs", "6", "--precision", "16.16")
    assert summary["test_accuracy"] >= 95  # about 98; 99 after the 15 epochs of the recipe


def test_a_resnet18_learns_images_in_the_cifar_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    import make_cifar

    make_cifar.write(tmp_path, train=480, test=160, classes=10)
    flags = ["--dataset", "cifar10", "--data-dir", str(tmp_path), "--image-size", "12", "--model", "resnet18"]
    flags += ["--epochs", "3", "--replicas", "2", "--optimizer", "adamw", "--learning-rate", "0.001"]
    summary = summary_of(tmp_path / "run", *flags, "--warmup-updates", "5")
    assert summary["test_accuracy"] >= 60  # chance is 10; 81 is typical
