"""The memory format of a training is recorded in its checkpoints, and a resumed run continues in it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Callable, Dict

import pytest

from raypod.plan.plan import Plan
from raypod.runtime.worker.environment import instance_environment
from raypod.training.checkpoint import resume, storage
from tests.support.saved_runs import run, weights_of

Make = Callable[..., Plan]
UPDATES = 2
MODEL = """
import torch

def make(channels, classes):
    return torch.nn.Sequential(
        torch.nn.Conv2d(channels, 256, 3, 2), torch.nn.ReLU(), torch.nn.Conv2d(256, 512, 3, 2),  # the second: a product
        torch.nn.Flatten(), torch.nn.Linear(512, classes))
"""


@pytest.mark.parametrize(
    ("requested", "of_checkpoint", "used"),
    [
        ("auto", {resume.MEMORY_FORMAT: "contiguous"}, "contiguous"),
        ("auto", {resume.MEMORY_FORMAT: "channels_last"}, "channels_last"),
        ("auto", {}, "contiguous"),  # a checkpoint of a version without formats
        ("channels_last", {resume.MEMORY_FORMAT: "contiguous"}, "channels_last"),
    ],
)
def test_a_run_that_leaves_the_choice_continues_in_the_format_of_the_checkpoint(
    make: Make, requested: str, of_checkpoint: Dict[str, Any], used: str
) -> None:
    plan = make(training={"memory_format": requested})
    manifest = resume.manifest_of(plan, 3, 1, "", {})
    others = {key: value for key, value in manifest.settings.items() if key != resume.MEMORY_FORMAT}
    recorded = dataclasses.replace(manifest, settings={**others, **of_checkpoint})
    continued = resume.in_recorded_format(plan, recorded)
    assert [
        instance_environment(continued, spec)["EMULATED_POD_MEMORY_FORMAT"] for spec in plan.placement.instances
    ] == [used] * 2


@pytest.mark.parametrize("name", ["auto", "contiguous"])
def test_a_resumed_run_has_the_bits_of_one_without_interruption(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "format_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))

    def plan_of(folder: str, updates: int, **sections: Any) -> Plan:
        training = {"model": "format_model:make", "updates": updates, "lr_schedule": "constant", "batch_size": 2}
        run_section = {"fleet": "inline", "device": "emulated", **sections.pop("run", {})}
        training = {**training, **sections.pop("training", {})}
        plan = make(training=training, pod={"num_instances": 1}, run=run_section)
        return dataclasses.replace(plan, run_dir=str(tmp_path / folder))

    chosen = {"training": {"memory_format": name}}
    whole = weights_of(run(plan_of("whole", UPDATES, **chosen)))
    first = plan_of("parts", UPDATES // 2, **chosen)
    run(first)
    (checkpoint,), _ = storage.list_checkpoints(storage.checkpoints_folder(first.run_dir))
    manifest = checkpoint.manifest
    assert manifest.settings[resume.MEMORY_FORMAT] == ("channels_last" if name == "auto" else "contiguous")
    second = plan_of("parts", UPDATES, run={"resume": first.run_dir})
    assert weights_of(run(resume.in_recorded_format(second, manifest))) == whole
    other = {"training": {"memory_format": "contiguous" if name == "auto" else "channels_last"}}
    assert weights_of(run(plan_of("other", UPDATES, **other))) != whole, "both formats compute the same bits here"


@pytest.mark.parametrize(("value", "expected"), [("1", "1"), ("0", "0"), ("", "0")])
def test_instances_compile_as_the_command_requests(make, monkeypatch, value, expected):
    monkeypatch.setenv("EMULATED_POD_COMPILE", value)
    plan = make()
    assert instance_environment(plan, plan.placement.instances[0])["EMULATED_POD_COMPILE"] == expected
