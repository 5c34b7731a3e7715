"""The learning rate of an update in the optimizer of the device."""

from __future__ import annotations

from typing import Any

from raypod.plan.learning_rate import learning_rate
from raypod.plan.plan import Plan


class ScheduledRate:
    """Sets the learning rate of the schedule; a rate that the device has already costs nothing."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.is_set = True  # the device has, or will be compiled with, the optimizer's current values

    def set(self, training: Any, optimizer: Any, update: int) -> None:
        """Set the rate of an update (0-based) in `optimizer` and in the training model on the device."""
        plan = self._plan
        rate = learning_rate(plan.config, update, plan.total_updates, plan.updates_per_epoch)
        if self.is_set and rate == optimizer.param_groups[0]["lr"]:
            return
        for group in optimizer.param_groups:
            group["lr"] = rate
        training.setOptimizer(optimizer)
        self.is_set = True
