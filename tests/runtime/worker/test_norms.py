"""`--log`: norms of gradients and weights, and the learning rate, in `metrics.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import torch
from torch import nn

from raypod import train
from raypod.errors import ConfigError
from raypod.plan.plan import Plan
from raypod.training.checkpoint.tensors import read_tensors
from raypod.training.models.norms import NormMeter, norm

FLAGS = ["--fleet", "inline", "--device", "emulated", "--model", "tiny", "--updates", "4", "--warmup-updates", "2"]
ALL = ["--log", "grad-norm,weight-norm,update-ratio"]


def lines(folder: Path, *flags: str) -> List[Dict[str, Any]]:
    assert train.main([*FLAGS, "--run-dir", str(folder), *flags]) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path, update: int) -> List[torch.Tensor]:
    path = folder / "checkpoints" / f"update-{update:08d}" / "weights.safetensors"
    return [value for name, value in read_tensors(path)[0].items() if "running" not in name and "num_" not in name]


def test_every_update_has_the_norms_and_the_values_of_the_optimizer(tmp_path: Path) -> None:
    sgd = ["--momentum", "0", "--weight-decay", "0", "--lr-schedule", "constant", "--loss-scaling", "2"]
    saved = ["--checkpoint-every", "1 update", "--keep-checkpoints", "9"]
    found = lines(tmp_path, *ALL, *sgd, *saved)
    assert [each["learning_rate"] for each in found] == pytest.approx([0.1 / 3, 0.2 / 3, 0.1, 0.1])
    assert [(each["loss_scaling"], each["samples"] // each["update"]) for each in found] == [(2.0, 32)] * 4
    for line in found[1:]:
        before, after = (weights(tmp_path, update) for update in (line["update"] - 1, line["update"]))
        change = norm([one.double() - other.double() for one, other in zip(after, before)])
        assert line["weight_norm"] == pytest.approx(norm(after))
        assert line["update_ratio"] == pytest.approx(change / norm(before))
        assert line["grad_norm"] == pytest.approx(change / line["learning_rate"], rel=1e-4)


def test_the_norms_are_measured_before_clipping_and_change_no_bit(tmp_path: Path) -> None:
    clipped = ["--max-grad-norm", "1e-3", "--device-iterations", "2"]
    plain, logged = lines(tmp_path / "plain", *clipped), lines(tmp_path / "logged", *clipped, *ALL)
    assert [each["loss"] for each in plain] == [each["loss"] for each in logged]
    assert all(each["grad_norm"] > 1e-2 for each in logged)
    assert not {"grad_norm", "weight_norm", "update_ratio"} & set(plain[0])
    without = [each["weight_norm"] is None for each in logged]  # weights are read after a call
    assert without == [True, False, True, False]
    assert [each["learning_rate"] for each in logged][::2] == [each["learning_rate"] for each in logged][1::2]


def test_what_cannot_be_logged_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[..., Plan]
) -> None:
    assert train.main([*FLAGS, "--run-dir", str(tmp_path / "run"), "--log", "norm"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "known are grad-norm, weight-norm, update-ratio" in line
    with pytest.raises(ConfigError, match="on IPUs use weight-norm,update-ratio"):
        NormMeter(make(run={"log": ["grad-norm"]}), nn.Linear(1, 1), object())  # as PopTorch's executor
