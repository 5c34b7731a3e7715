"""The recipes of `configs/` and the planning of command lines, without the data sets' files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import List

import pytest

from raypod.api.planning import plan_of
from raypod.plan import resolve
from raypod.plan.plan import Plan
from raypod.plan.tables import render
from raypod.plan.values import ipus_of
from raypod.train import parser
from tests.support import ROOT

RECIPES = sorted((ROOT / "configs").glob("*.yaml"))


def pods(recipe: Path) -> List[str]:
    line = next(line for line in recipe.read_text().splitlines() if line.startswith("# Pods: "))
    return re.findall(r"\b(?:emulated-)?pod\d*\b", line)


def planned(recipe: Path, pod: str) -> Plan:
    flags = ["--config", str(recipe), "--cluster", str(ROOT / "cluster" / f"{pod}.yaml"), "--dry-run"]
    return plan_of(parser(flags).parse_args(flags))


NAMED = [(recipe, pod) for recipe in RECIPES for pod in pods(recipe)]


@pytest.mark.parametrize(("recipe", "pod"), NAMED, ids=[f"{recipe.stem} on {pod}" for recipe, pod in NAMED])
def test_a_recipe_can_be_planned_on_the_pods_it_names(recipe: Path, pod: str) -> None:
    plan = planned(recipe, pod)
    assert plan.placement.cluster.name == pod
    assert plan.total_updates > 0
    assert set(ipus_of(plan.pipeline_splits)) == set(range(plan.geometry.ipus_per_replica))
    assert f"= {plan.geometry.global_batch_size} samples per update" in render(plan)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_begins_with_its_command(recipe: Path) -> None:
    command = re.search(r"^#     raypod train (.*)", recipe.read_text(), re.MULTILINE)
    words = command.group(1).split()
    assert words[words.index("--config") + 1] == f"configs/{recipe.name}"
    assert "--cluster" not in words or Path(words[words.index("--cluster") + 1]).stem in pods(recipe)


@pytest.mark.parametrize(
    ("pod", "combined", "global_batch", "updates"), [(4, 8208, 16416, 78), (16, 2052, 16416, 78), (64, 504, 16128, 79)]
)
def test_imagenet_has_the_published_sizes(pod: int, combined: int, global_batch: int, updates: int) -> None:
    plan = planned(ROOT / "configs" / f"imagenet-resnet50-pod{pod}.yaml", f"pod{pod}")
    geometry = plan.geometry
    assert (geometry.combined_batch_size, geometry.global_batch_size) == (combined, global_batch)
    assert (plan.updates_per_epoch, plan.config.training.warmup_updates) == (updates, 5 * updates)
    assert "1281167 training, 50000 test (published sizes; the files are missing)" in render(plan)


def test_the_default_run_is_a_recipe() -> None:
    assert resolve.from_values(resolve.read_yaml(ROOT / "configs" / "digits.yaml")) == resolve.from_values({})
