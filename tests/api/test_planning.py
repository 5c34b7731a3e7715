"""The plan of a user's model that raises or that an IPU rejects, with and without strict mode."""

from __future__ import annotations

import os
from typing import Any, List

import pytest
import torch
from torch import nn

from raypod import train
from raypod.__main__ import main
from raypod.api import planning
from raypod.errors import ConfigError

COMMANDS = [["plan", "--memory"], ["plan", "--memory", "--json"], ["train", "--dry-run"]]


def bad_forward(channels: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(7, 10))


def bad_constructor(channels: int, classes: int) -> nn.Module:
    raise ValueError("no such\nlayer")


class ReadsAValue(nn.Linear):
    """Reads the value of a tensor, which an IPU rejects."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = super().forward(images.flatten(1))
        return logits if logits.sum() < 1e9 else logits + 1


def reads_a_value(channels: int, classes: int) -> nn.Module:
    return ReadsAValue(64, 10)


def plan(command: List[str], model: str, *flags: str) -> int:
    words = [*command[1:], "--model", f"{__name__}:{model}", "--device", "emulated", *flags]
    return train.main(words) if command[0] == "train" else main([command[0], *words])


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("model", "cause"),
    [("bad_forward", "RuntimeError: mat1 and mat2 shapes"), ("bad_constructor", "ValueError: no such layer")],
)
def test_the_plan_of_a_model_that_raises_has_no_estimate(
    command: List[str], model: str, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(command, model) == 0
    assert f"{__name__}:{model}: {cause}" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--pipeline-splits=1", "--pipeline-balance=parameters"])
def test_the_pipeline_of_a_model_that_raises_is_an_error(
    command: List[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(command, "bad_forward", flag, "--ipus-per-replica", "2", "--gradient-accumulation", "3") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"raypod: error: {__name__}:bad_forward: RuntimeError: mat1" in line


@pytest.mark.parametrize("command", COMMANDS)
def test_strict_mode_rejects_in_the_plan_what_the_run_rejects(
    command: List[str], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert plan(command, "reads_a_value") == 0
    assert "aten::item" in caplog.text
    capsys.readouterr()
    assert plan(command, "reads_a_value", "--strict") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"raypod: error: {__name__}:reads_a_value: poptorch.errors.Error: aten::item" in line
    assert "EMULATED_POD_STRICT" not in os.environ


def test_strict_mode_of_the_environment_applies_unless_it_is_off(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")
    assert plan(["plan"], "reads_a_value") == 2
    assert plan(["plan"], "reads_a_value", "--no-strict") == 0
    assert os.environ["EMULATED_POD_STRICT"] == "1"


def test_a_model_that_does_not_fit_is_an_error_in_strict_mode(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the micro-batch of the plan, which is larger than the compiled one."""
    monkeypatch.setattr("poptorch.device.compile.memory_estimate.MEMORY_BYTES", 20_000_000)
    flags = ["plan", "--memory", "--device", "emulated", "--model", "resnet8", "--batch-size", "256"]
    assert main(flags) == 0
    assert ": DOES NOT FIT" in capsys.readouterr().out
    assert main([*flags, "--strict"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "raypod: error: resnet8: poptorch.errors.Error: Out of memory" in line
    assert main([*flags, "--strict", "--batch-size", "8"]) == 0


def test_ray_accepts_only_paths_in_utf8(make: Any) -> None:
    sections: Any = {"pod": {"executable_cache_path": "caf\udce9", "num_instances": 1}}
    with pytest.raises(
        ConfigError, match=r"pod.executable_cache_path: the name caf\\xe9 is not UTF-8, and Ray accepts no"
    ):
        planning.check_host(make(**sections, run={"fleet": "ray"}))
    planning.check_host(make(**sections, run={"fleet": "inline"}))
