"""`--ema`: the average of the weights, its evaluation, and its resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Counter, Dict, List

import poptorch
import pytest
import torch

from raypod import train
from raypod.training.checkpoint.tensors import read_tensors, weights_sha256

DECAY = 0.8


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many times weights are read back, or a model is attached or detached, counted by method."""
    counted: Counter[str] = Counter()
    for method in ("copyWeightsToHost", "attachToDevice", "detachFromDevice"):
        real = getattr(poptorch.PoplarExecutor, method)
        monkeypatch.setattr(
            poptorch.PoplarExecutor,
            method,
            lambda self, real=real, method=method: (counted.update([method]), real(self))[1],
        )
    return counted


def command(folder: Path, *flags: str) -> Dict[str, Any]:
    inline = ["--fleet", "inline", "--device", "emulated", "--model", "tiny", "--lr-schedule", "constant"]
    assert train.main([*inline, "--run-dir", str(folder), *flags]) == 0
    summary: Dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def tensors(folder: Path, update: int, name: str) -> Dict[str, torch.Tensor]:
    return read_tensors(folder / "checkpoints" / f"update-{update:08d}" / f"{name}.safetensors")[0]


@pytest.mark.parametrize("device_iterations", [1, 2])
def test_the_average_is_that_of_the_weights_after_each_call(device_iterations: int, tmp_path: Path) -> None:
    flags = ["--updates", "6", "--device-iterations", str(device_iterations)]
    saved = [*flags, "--checkpoint-every", f"{device_iterations} updates", "--keep-checkpoints", "9"]
    averaged = command(tmp_path / "averaged", *saved, "--ema", str(DECAY))
    plain = command(tmp_path / "plain", *flags)
    assert averaged["weights_sha256"] == plain["weights_sha256"]
    assert plain["ema_sha256"] is None
    share = 1 - DECAY**device_iterations
    average = tensors(tmp_path / "averaged", device_iterations, "ema")
    for update in range(2 * device_iterations, 7, device_iterations):
        weights = tensors(tmp_path / "averaged", update, "weights")
        average = {name: value + (weights[name] - value) * share for name, value in average.items()}
    written = tensors(tmp_path / "averaged", 6, "ema")
    assert all(torch.equal(average[name], written[name]) for name in written)
    assert averaged["ema_sha256"] == weights_sha256(written) != averaged["weights_sha256"]


def test_the_average_is_evaluated_and_is_the_start_of_a_fine_tuning(tmp_path: Path) -> None:
    averaged = command(tmp_path / "averaged", "--updates", "12", "--ema", "0.99")
    again = ["--updates", "1", "--init-weights", str(tmp_path / "averaged"), "--learning-rate", "1e-30"]
    evaluated = command(tmp_path / "again", *again)
    assert evaluated["test_loss"] == pytest.approx(averaged["test_loss"], rel=1e-6)
    plain = command(tmp_path / "plain", "--updates", "12")
    assert plain["test_loss"] != pytest.approx(averaged["test_loss"], rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "reads"),
    [
        (["--ema", "0.8", "--ema-every", "3"], 4),  # after 3, 6 and 9 updates, and for the last checkpoint
        (["--ema", "0.98"], 3),  # after 5 and 10 updates, each a tenth of the average, and for the last checkpoint
        (["--ema", "0.8"], 11),
        ([], 1),
    ],
)
def test_the_average_reads_the_weights_only_when_it_is_due(
    flags: List[str], reads: int, tmp_path: Path, moves: Counter[str]
) -> None:
    command(tmp_path / "run", *flags, "--updates", "11", "--checkpoint-every", "99 updates")
    assert moves["copyWeightsToHost"] == reads


def test_an_evaluation_reads_the_weights_once_and_moves_the_device_twice(tmp_path: Path, moves: Counter[str]) -> None:
    flags = ["--batch-size", "32", "--updates", "33", "--checkpoint-every", "99 updates"]  # 11 updates per epoch
    command(tmp_path / "plain", *flags)
    plain = moves.copy()
    moves.clear()
    command(tmp_path / "evaluated", *flags, "--evaluate-every", "1")
    moves.subtract(plain)
    assert moves == {"copyWeightsToHost": 2, "attachToDevice": 4, "detachFromDevice": 4}  # for two evaluations


def test_the_average_of_every_few_updates_has_their_decay(tmp_path: Path) -> None:
    flags = ["--updates", "6", "--checkpoint-every", "1 updates", "--keep-checkpoints", "9"]
    command(tmp_path / "run", *flags, "--ema", str(DECAY), "--ema-every", "2")
    averages = [tensors(tmp_path / "run", update, "ema") for update in range(1, 7)]
    weights = [tensors(tmp_path / "run", update, "weights") for update in range(1, 7)]
    for name in averages[0]:
        if "running" not in name and "tracked" not in name:
            assert torch.equal(averages[1][name], averages[2][name])
            added = averages[2][name] + (weights[3][name] - averages[2][name]) * (1 - DECAY**2)
            assert torch.equal(averages[3][name], added)


def test_a_resumed_run_has_the_same_average_and_cannot_begin_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--ema", "0.9", "--precision", "16.16"]
    whole = command(tmp_path / "whole", *flags, "--updates", "6")
    command(tmp_path / "part", *flags, "--updates", "3")
    part = command(tmp_path / "part", "--resume", str(tmp_path / "part"), "--updates", "6")
    assert (part["ema_sha256"], part["weights_sha256"]) == (whole["ema_sha256"], whole["weights_sha256"])
    command(tmp_path / "plain", "--updates", "2")
    capsys.readouterr()
    assert train.main(["--resume", str(tmp_path / "plain"), "--updates", "4", "--ema", "0.9"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "its training.ema is None and this run's is 0.9" in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--ema-every 2", "--ema-every 2 has no effect without --ema"),
        ("--ema 0.9 --ema-every 3 --device-iterations 2", "--ema-every 3 is no multiple of --device-iterations 2"),
    ],
)
def test_a_wrong_interval_is_one_line(
    flags: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(["--run-dir", str(tmp_path / "run"), *flags.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.parametrize("decay", ["0", "1", "nan"])
def test_a_wrong_decay_is_one_line(decay: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--run-dir", str(tmp_path / "run"), "--ema", decay]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "training.ema" in line
