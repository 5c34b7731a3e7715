"""The estimated memory in the plan: a bar for each IPU, and JSON."""

from __future__ import annotations

import json
from typing import Callable, Dict

import pytest

from raypod import planning
from raypod.model.memory_bars import render_memory
from raypod.model.pipeline_table import inspect_pipeline
from raypod.plan.config import Config
from raypod.plan.plan import Plan
from raypod.tasks.registry import task_of


def test_the_plan_shows_a_bar_for_each_ipu(make: Callable[..., Plan]) -> None:
    training: Dict[str, object] = {"gradient_accumulation": 4, "batch_size": 64, "pipeline_splits": "features.5"}
    text = planning.render_with_pipeline(make(training=training, pod={"ipus_per_replica": 2}))
    assert "an estimate for Mk2 IPUs with 918 MB" in text
    bars = [line.split() for line in text.splitlines() if "%" in line and line.strip().startswith("IPU ")]
    assert [line[:2] for line in bars] == [["IPU", "0"], ["IPU", "1"]]
    assert all(line[2].startswith("[") for line in bars)
    single = planning.render_with_pipeline(make())
    assert single.count("  IPU 0  [") == 1
    assert "cycles" not in single


def test_activations_are_those_of_the_plans_micro_batch(make: Callable[..., Plan]) -> None:
    memory = [inspect_pipeline(make(training={"batch_size": size}), task_of(Config())).memory[0] for size in (8, 16)]
    assert memory[1].activations == 2 * memory[0].activations
    assert memory[1].weights == memory[0].weights


def test_json_has_the_estimate(make: Callable[..., Plan]) -> None:
    described = json.loads(json.dumps(planning.describe_with_pipeline(make())))["memory"]
    assert described["is_estimate"]
    (ipu,) = described["ipus"]
    assert ipu["total"] == sum(ipu[name] for name in ("weights", "gradients", "optimizer", "activations", "code"))
    assert ipu["share"] == pytest.approx(ipu["total"] / described["bytes_per_ipu"], abs=1e-3)


def test_a_bar_that_is_longer_than_the_memory_says_so(
    make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    (ipu,) = inspect_pipeline(make(), task_of(Config())).memory

    def line(share: float) -> str:
        monkeypatch.setattr("poptorch.device.memory_estimate.MEMORY_BYTES", ipu.total / share)
        return render_memory((ipu,)).splitlines()[-1]

    assert ".]  50 % (" in line(0.5)
    assert line(0.5).endswith(" MB)")
    assert line(0.9).endswith("nearly full")
    for share, figure in ((1.2, "!] 120 % ("), (1.001, "!] 100 % (")):  # 0.1 % is less than a character
        assert figure in line(share)
        assert line(share).endswith("DOES NOT FIT")
    assert "!" not in line(1.0)
