"""The learning rate and the loss scaling of an update in the optimizer of the device."""

from __future__ import annotations

from typing import Any, List

from raypod.plan.learning_rate import learning_rate, loss_scaling
from raypod.plan.plan import Plan


class ScheduledRate:
    """Sets the learning rate of the schedule and the loss scaling; values that the device has already cost nothing.

    A parameter group with an `lr` of its own follows the schedule from that one, as with torch's schedulers. The
    scaling of a combined accumulator follows the loss scaling unless the config has one for it.
    """

    def __init__(self, plan: Plan) -> None:
        training = plan.config.training
        self._plan = plan
        self.is_set = True  # the device has, or will be compiled with, the optimizer's current values
        # As the optimizer is built; the rate is that of the groups without their own.
        self._rate, self._scaling = training.learning_rate, loss_scaling(training, epoch=0)
        self._peaks: List[float] = []  # of each group
        self._scales_velocity = training.combined_accumulator and training.velocity_scaling is None

    def set(self, training: Any, optimizer: Any, update: int) -> None:
        """Set the values of an update (0-based) in `optimizer` and in the training model on the device."""
        plan, peak = self._plan, self._plan.config.training.learning_rate
        rate = learning_rate(plan.config, update, plan.total_updates, plan.updates_per_epoch)
        scaling = loss_scaling(plan.config.training, update // plan.updates_per_epoch)
        self._peaks = self._peaks or [group["lr"] for group in optimizer.param_groups]
        if self.is_set and (rate, scaling) == (self._rate, self._scaling):
            return
        for group, own in zip(optimizer.param_groups, self._peaks):
            group["lr"] = rate if own == peak else own * (rate / peak)
            if self._scales_velocity:
                group["velocity_scaling"] = scaling
        optimizer.loss_scaling = scaling
        training.setOptimizer(optimizer)
        self._rate, self._scaling, self.is_set = rate, scaling, True
