"""Learning rates of parameter groups, norms (`--log`), and the average of the weights (`--ema`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Counter, Dict, List, Optional

import poptorch
import pytest
import torch
from torch import nn

from raypod import train
from raypod.errors import ConfigError
from raypod.plan.learning_rate import learning_rate
from raypod.plan.plan import Plan
from raypod.runtime.worker.replica_model import ScheduledRate
from raypod.training.checkpoint.tensors import read_tensors, weights_sha256
from raypod.training.models import optimizers
from raypod.training.models.norms import NormMeter, norm


class Device:
    """Has the rates of the optimizer that was set last."""

    def __init__(self) -> None:
        self.rates: List[List[float]] = []

    def setOptimizer(self, optimizer: Any) -> None:
        self.rates.append([group["lr"] for group in optimizer.param_groups])


@pytest.mark.parametrize("own", [[None, None], [0.01, None], [None, 0.5]])
def test_a_group_with_its_own_rate_follows_the_schedule_from_there(make: Callable[..., Plan], own: List[Any]) -> None:
    plan = make(training={"learning_rate": 0.2, "updates": 8, "warmup_updates": 2, "lr_schedule": "linear"})
    layer = nn.Linear(2, 2)
    groups: List[Any] = [{"params": [layer.weight]}, {"params": [layer.bias]}]
    groups = [{**group, **({} if rate is None else {"lr": rate})} for group, rate in zip(groups, own)]
    optimizer, device, scheduled = optimizers.build_optimizer(plan.config, groups), Device(), ScheduledRate(plan)
    expected = []
    for update in range(8):
        scheduled.set(device, optimizer, update)
        rate = learning_rate(plan.config, update, plan.total_updates)
        expected.append([rate if peak is None else pytest.approx(rate * peak / 0.2) for peak in own])
    scheduled.set(device, optimizer, 7)  # the device has it
    scheduled.is_set = False  # as after a checkpoint was loaded
    scheduled.set(device, optimizer, 7)
    assert device.rates == [*expected, expected[7]]


NO_GROUPS = "it returns a list of groups"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            lambda network: torch.optim.SGD(network.parameters(), lr=0.1),
            "returned a SGD; .*; a model has one optimizer",
        ),
        (lambda network: [torch.optim.Adam(network.parameters())] * 2, "returned a Adam; .*a group with `lr`"),
        (lambda network: {"params": list(network.parameters())}, f"returned one dict; {NO_GROUPS}"),
        (lambda network: list(network.parameters()), f"returned a Parameter; {NO_GROUPS}"),
        (lambda network: [], f"returned no group; {NO_GROUPS}"),
        (lambda network: None, f"returned a NoneType; {NO_GROUPS}"),
    ],
)
def test_optimizers_as_groups_and_unknown_keys_are_refused(make: Callable[..., Plan], made: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"parameter_groups of the task {words}"):
        optimizers.build_optimizer(make().config, made(nn.Linear(2, 2)))
    groups: List[Any] = [{"params": nn.Linear(2, 2).parameters(), "learning_rate": 0.03}]
    with pytest.raises(ConfigError, match="sgd has no 'learning_rate'; the keys of a group are .*lr, .*momentum"):
        optimizers.build_optimizer(make().config, groups)


def test_a_constant_rate_is_set_once_for_the_run_and_groups_can_be_any_iterable(make: Callable[..., Plan]) -> None:
    plan = make(training={"learning_rate": 0.2, "updates": 8, "warmup_updates": 0, "lr_schedule": "constant"})
    groups: Any = ({"params": [each], "lr": 0.03} for each in nn.Linear(2, 2).parameters())
    optimizer, device, scheduled = optimizers.build_optimizer(plan.config, groups), Device(), ScheduledRate(plan)
    for update in range(8):
        scheduled.set(device, optimizer, update)
    assert (device.rates, [group["lr"] for group in optimizer.param_groups]) == ([], [0.03] * 2)


@pytest.mark.parametrize("velocity", [None, 7.0])
def test_the_loss_and_velocity_scalings_change_together(make: Callable[..., Plan], velocity: Optional[float]) -> None:
    training: Dict[str, Any] = {"lr_schedule": "constant", "warmup_updates": 0, "epochs": 2}
    training.update(initial_loss_scaling=16.0, loss_scaling=32.0, combined_accumulator=True, velocity_scaling=velocity)
    plan = make(training=training)
    groups: List[Any] = [{"params": nn.Linear(2, 2).parameters()}]
    optimizer, device, scheduled = optimizers.build_optimizer(plan.config, groups), Device(), ScheduledRate(plan)

    def scalings(update: int) -> List[float]:
        scheduled.set(device, optimizer, update)
        return [optimizer.loss_scaling, optimizer.param_groups[0]["velocity_scaling"]]

    begin, end = plan.updates_per_epoch - 1, plan.updates_per_epoch
    assert ([scalings(0), scalings(begin)], len(device.rates)) == ([[16.0, velocity or 16.0]] * 2, 0)
    assert ([scalings(end), scalings(end + 1)], len(device.rates)) == ([[32.0, velocity or 32.0]] * 2, 1)


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


def test_what_cannot_be_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[..., Plan]) -> None:
    assert train.main([*FLAGS, "--run-dir", str(tmp_path / "run"), "--log", "norm"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "known are grad-norm, weight-norm, update-ratio" in line
    with pytest.raises(ConfigError, match="on IPUs use weight-norm,update-ratio"):
        NormMeter(make(run={"log": ["grad-norm"]}), nn.Linear(1, 1), object())  # as PopTorch's executor


DECAY = 0.8


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many times weights are read back, or a model is attached or detached, counted by method."""
    counted: Counter[str] = Counter()
    kind = poptorch.PoplarExecutor
    for method in ("copyWeightsToHost", "attachToDevice", "detachFromDevice"):
        real = getattr(kind, method)
        count = lambda self, real=real, name=method: (counted.update([name]), real(self))[1]  # noqa: E731
        monkeypatch.setattr(kind, method, count)
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
def test_the_average_reads_only_when_due(flags: List[str], reads: int, tmp_path: Path, moves: Counter[str]) -> None:
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


def test_a_resumed_run_has_the_same_average_and_begins_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        *((f"--ema {decay}", "training.ema") for decay in ("0", "1", "nan")),
    ],
)
def test_wrong_averages(flags: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--run-dir", str(tmp_path / "run"), *flags.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
