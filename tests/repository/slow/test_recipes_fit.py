"""Every recipe of `configs/` fits by the estimate of the memory, on the pod that it names first."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from raypod.__main__ import main
from tests.support import ROOT

RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
LIMITS = {"gpt2-pod16": 90}  # percent of each IPU; else 100


@pytest.mark.timeout(1800)  # EfficientNet-B4 has 95 blocks and images of 380x380 pixels
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_fits(processes: None, recipe: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    pod = re.findall(r"# Pods: .*?\b(pod\d+|emulated-pod)\b", recipe.read_text())
    cluster = ["--cluster", str(ROOT / "cluster" / f"{pod[0]}.yaml")]
    data = ["--data-dir", str(tmp_path)] if "imagenet" in recipe.stem or "cifar" in recipe.stem else []
    assert main(["plan", "--memory", "--strict", "--config", str(recipe), *cluster, *data]) == 0
    found = [int(share) for share in re.findall(r"IPU \d+ .*?\] +(\d+) %", capsys.readouterr().out)]
    assert found
    assert max(found) <= LIMITS.get(recipe.stem, 100)
