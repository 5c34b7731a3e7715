"""Optimizers by name, and the learning rate of every update."""

from __future__ import annotations

import math
from typing import Any, Dict, List

import poptorch
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
    common: Dict[str, Any] = {"lr": training.learning_rate, "loss_scaling": training.loss_scaling}
    if training.optimizer == "sgd":
        return poptorch.optim.SGD(groups, momentum=training.momentum, **common)
    if training.optimizer == "adam":
        return poptorch.optim.Adam(groups, **common)
    return poptorch.optim.AdamW(groups, **common)


def learning_rate(config: Config, update: int, total_updates: int) -> float:
    """The learning rate of update `update` (0-based): linear warm-up, then constant or a half cosine to zero."""
    training = config.training
    if update < training.warmup_updates:
        return training.learning_rate * (update + 1) / (training.warmup_updates + 1)
    if training.lr_schedule == "constant":
        return training.learning_rate
    span = max(1, total_updates - training.warmup_updates)
    return training.learning_rate * 0.5 * (1 + math.cos(math.pi * (update - training.warmup_updates) / span))
