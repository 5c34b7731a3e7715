"""The learning rates of an optimizer's parameter groups over a run."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

import pytest
import torch
from torch import nn

from raypod.errors import ConfigError
from raypod.plan.learning_rate import learning_rate
from raypod.plan.plan import Plan
from raypod.runtime.worker.replica_model import ScheduledRate
from raypod.training.models import optimizers


class Device:
    """Has the rates of the optimizer that was set last."""

    def __init__(self) -> None:
        self.rates: List[List[float]] = []

    def setOptimizer(self, optimizer: Any) -> None:
        self.rates.append([group["lr"] for group in optimizer.param_groups])


@pytest.mark.parametrize("own", [[None, None], [0.01, None], [None, 0.5]])
def test_a_group_with_its_own_rate_follows_the_schedule_from_there(make: Callable[..., Plan], own: List[Any]) -> None:
    training = {"learning_rate": 0.2, "updates": 8, "warmup_updates": 2, "lr_schedule": "linear"}
    plan = make(training=training)
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


def test_a_key_of_a_group_that_the_optimizer_does_not_have_is_an_error(make: Callable[..., Plan]) -> None:
    groups: List[Any] = [{"params": nn.Linear(2, 2).parameters(), "learning_rate": 0.03}]
    with pytest.raises(ConfigError, match="sgd has no 'learning_rate'; the keys of a group are .*lr, .*momentum"):
        optimizers.build_optimizer(make().config, groups)


def test_a_constant_rate_is_set_once_for_the_whole_run(make: Callable[..., Plan]) -> None:
    plan = make(training={"learning_rate": 0.2, "updates": 8, "warmup_updates": 0, "lr_schedule": "constant"})
    groups: List[Any] = [{"params": nn.Linear(2, 2).parameters(), "lr": 0.03}]
    optimizer, device, scheduled = optimizers.build_optimizer(plan.config, groups), Device(), ScheduledRate(plan)
    for update in range(8):
        scheduled.set(device, optimizer, update)
    assert device.rates == []
    assert optimizer.param_groups[0]["lr"] == 0.03


@pytest.mark.parametrize("velocity", [None, 7.0])
def test_the_loss_scaling_and_that_of_a_combined_velocity_change_together(
    make: Callable[..., Plan], velocity: Optional[float]
) -> None:
    training: Dict[str, Any] = {"lr_schedule": "constant", "warmup_updates": 0, "epochs": 2}
    training.update(initial_loss_scaling=16.0, loss_scaling=32.0, combined_accumulator=True, velocity_scaling=velocity)
    plan = make(training=training)
    groups: List[Any] = [{"params": nn.Linear(2, 2).parameters()}]
    optimizer, device, scheduled = optimizers.build_optimizer(plan.config, groups), Device(), ScheduledRate(plan)

    def scalings(update: int) -> List[float]:
        scheduled.set(device, optimizer, update)
        return [optimizer.loss_scaling, optimizer.param_groups[0]["velocity_scaling"]]

    begin, end = plan.updates_per_epoch - 1, plan.updates_per_epoch
    assert [scalings(0), scalings(begin)] == [[16.0, velocity or 16.0]] * 2
    assert len(device.rates) == 0
    assert [scalings(end), scalings(end + 1)] == [[32.0, velocity or 32.0]] * 2
    assert len(device.rates) == 1


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            lambda network: torch.optim.SGD(network.parameters(), lr=0.1),
            "returned a SGD; .*; a model has one optimizer",
        ),
        (lambda network: [torch.optim.Adam(network.parameters())] * 2, "returned a Adam; .*a group with `lr`"),
        (lambda network: {"params": list(network.parameters())}, "returned one dict; it returns a list of groups"),
        (lambda network: list(network.parameters()), "returned a Parameter; it returns a list of groups"),
        (lambda network: [], "returned no group; it returns a list of groups"),
        (lambda network: None, "returned a NoneType; it returns a list of groups"),
    ],
)
def test_optimizers_in_place_of_groups_are_refused_with_the_reason(
    make: Callable[..., Plan], made: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"parameter_groups of the task {words}"):
        optimizers.build_optimizer(make().config, made(nn.Linear(2, 2)))


def test_groups_can_be_any_iterable(make: Callable[..., Plan]) -> None:
    groups: Any = ({"params": [each]} for each in nn.Linear(2, 2).parameters())
    assert len(optimizers.build_optimizer(make().config, groups).param_groups) == 2
