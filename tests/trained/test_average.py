"""`raypod average`: the mean of the newest checkpoints, and its evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Callable, List

import pytest
import torch

from raypod.__main__ import main
from raypod.checkpoint import storage, tensors
from raypod.errors import ConfigError
from raypod.trained.average import average, mean
from raypod.trained.evaluate import evaluate


def test_means_are_computed_in_float64_and_integers_are_the_newest() -> None:
    values = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    states = [{"w": value, "n": torch.tensor(index)} for index, value in enumerate(values)]
    found = mean(states)
    assert found["w"].dtype == torch.float32
    assert found["w"].item() == torch.tensor(1 / 3).item()  # float32 would lose the 1
    assert found["n"].item() == 0
    with pytest.raises(ConfigError, match="the checkpoints are of different models: w differs"):
        mean([*states, {**states[0], "w": torch.zeros(2)}])


def test_the_average_is_written_and_evaluated(digits_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "mean.safetensors"
    found = average(digits_run, 3, file)
    newest = storage.list_checkpoints(digits_run / "checkpoints")[0][:3]
    assert found["checkpoints"] == [each.path.name for each in newest]
    states = [tensors.read_tensors(each.path / "weights.safetensors")[0] for each in newest]
    written, metadata = tensors.read_tensors(file)
    for name, value in states[0].items():
        expected = value if not value.is_floating_point() else torch.stack([s[name].double() for s in states]).mean(0)
        torch.testing.assert_close(written[name].double(), expected.double(), rtol=1e-6, atol=1e-12)
    assert metadata["raypod.averaged"] == ",".join(found["checkpoints"])
    assert found["newest"]["loss"] == evaluate(digits_run)["loss"]
    assert found["average"]["loss"] != found["newest"]["loss"]
    alone = evaluate(digits_run, str(file))
    assert (alone["loss"], alone["weights_sha256"]) == (found["average"]["loss"], found["weights_sha256"])


def test_a_run_starts_from_the_average(digits_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from raypod import train

    file = tmp_path / "mean.safetensors"
    assert main(["average", str(digits_run), "--last", "2", "--output", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    flags = ["--fleet", "inline", "--replicas", "1", "--updates", "1", "--device", "emulated"]
    assert train.main([*flags, "--init-weights", str(file), "--run-dir", str(tmp_path / "run")]) == 0
    assert found["update"] == 22


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--last", "9"], "--keep-checkpoints 9"),
        (["--last", "0"], "--last 0 must be at least 1"),
        (["--last", "x"], "invalid int value"),
        (["--output", "/no/such/x.safetensors"], "does not exist"),
    ],
)
def test_wrong_requests(digits_run: Path, fails: Callable[[List[str]], str], flags: List[str], message: str) -> None:
    assert message in fails(["average", str(digits_run), *flags])
    assert not list(digits_run.glob("average-*"))
