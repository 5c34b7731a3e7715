"""The learning rate of an update in the optimizer of the device."""

from __future__ import annotations

from typing import Any, List

from raypod.plan.learning_rate import learning_rate
from raypod.plan.plan import Plan


class ScheduledRate:
    """Sets the learning rate of the schedule; a rate that the device has already costs nothing.

    A parameter group with an `lr` of its own follows the schedule from that one, as with torch's schedulers.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.is_set = True  # the device has, or will be compiled with, the optimizer's current values
        self._rate = plan.config.training.learning_rate  # of the groups without their own, as the optimizer is built
        self._peaks: List[float] = []  # of each group

    def set(self, training: Any, optimizer: Any, update: int) -> None:
        """Set the rate of an update (0-based) in `optimizer` and in the training model on the device."""
        plan, peak = self._plan, self._plan.config.training.learning_rate
        rate = learning_rate(plan.config, update, plan.total_updates, plan.updates_per_epoch)
        self._peaks = self._peaks or [group["lr"] for group in optimizer.param_groups]
        if self.is_set and rate == self._rate:
            return
        for group, own in zip(optimizer.param_groups, self._peaks):
            group["lr"] = rate if own == peak else own * (rate / peak)
        training.setOptimizer(optimizer)
        self._rate, self.is_set = rate, True
