"""The learning rates of an optimizer's parameter groups over a run."""

from __future__ import annotations

from typing import Any, Callable, List

import pytest
from torch import nn

from raypod.instance.rate import ScheduledRate
from raypod.model import optimizers
from raypod.plan.learning_rate import learning_rate
from raypod.plan.plan import Plan


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


def test_a_constant_rate_is_set_once_for_the_whole_run(make: Callable[..., Plan]) -> None:
    plan = make(training={"learning_rate": 0.2, "updates": 8, "warmup_updates": 0, "lr_schedule": "constant"})
    groups: List[Any] = [{"params": nn.Linear(2, 2).parameters(), "lr": 0.03}]
    optimizer, device, scheduled = optimizers.build_optimizer(plan.config, groups), Device(), ScheduledRate(plan)
    for update in range(8):
        scheduled.set(device, optimizer, update)
    assert device.rates == []
    assert optimizer.param_groups[0]["lr"] == 0.03
