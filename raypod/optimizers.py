"""Optimizers by name, and the learning rate of every update."""

from __future__ import annotations

import math
from typing import Any, Dict, List

import poptorch
import torch
from torch import nn

from raypod.config import Config


def build_optimizer(config: Config, model: nn.Module) -> Any:
    """The poptorch optimizer of a config. Weight decay is for matrices and kernels, not for biases and norms."""
    training = config.training
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups: List[Dict[str, Any]] = [
        {"params": decayed, "weight_decay": training.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    # With half weights their states are half too, but the squares: they would vanish there.
    half = training.precision == "16.16"
    dtype = torch.float16 if half else torch.float32
    common: Dict[str, Any] = {"lr": training.learning_rate, "loss_scaling": training.loss_scaling, "accum_type": dtype}
    if training.optimizer == "sgd":
        return poptorch.optim.SGD(groups, momentum=training.momentum, velocity_accum_type=dtype, **common)
    kind = {"adam": poptorch.optim.Adam, "adamw": poptorch.optim.AdamW, "lamb": poptorch.optim.LAMB}[training.optimizer]
    return kind(groups, first_order_momentum_accum_type=dtype, second_order_momentum_accum_type=torch.float32, **common)


def load_state(optimizer: Any, state: Dict[str, Any]) -> None:
    """Take over a `state_dict()`, but for its settings: a run may go on with others than it was saved with."""
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, settings):
        group.update(own)


def learning_rate(config: Config, update: int, total_updates: int, updates_per_epoch: int = 1) -> float:
    """The learning rate of update `update` (0-based): linear warm-up, then flat, in steps, or half a cosine to 0."""
    training = config.training
    if update < training.warmup_updates:
        return training.learning_rate * (update + 1) / (training.warmup_updates + 1)
    if training.lr_schedule == "constant":
        return training.learning_rate
    if training.lr_schedule == "step":
        steps_done = sum(update >= epoch * updates_per_epoch for epoch in training.lr_steps or ())
        return training.learning_rate * training.lr_gamma**steps_done
    span = max(1, total_updates - training.warmup_updates)
    return training.learning_rate * 0.5 * (1 + math.cos(math.pi * (update - training.warmup_updates) / span))
