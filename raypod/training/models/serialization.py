"""Large products and losses in parts, which need less memory of an IPU."""

from __future__ import annotations

import functools
from typing import Optional

import poptorch
import torch
from torch import nn
from torch.nn import functional

from raypod.training.models.decoder import Projection


def split_products(network: nn.Module) -> None:
    """Let the projections of a network compute their products on the device in the parts that they have."""
    for module in network.modules():
        if isinstance(module, Projection) and module.parts > 1:
            mode = poptorch.MatMulSerializationMode.OutputChannels
            module.product = functools.partial(poptorch.serializedMatMul, mode=mode, factor=module.parts)


def mean_loss(
    logits: torch.Tensor, targets: torch.Tensor, length: Optional[int], count: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """Return the mean cross-entropy in float32, of `length` tokens of each window at a time.

    Args:
        logits: [n, tokens, vocabulary].
        targets: int64 [n, tokens].
        length: None for all tokens at once.
        count: of the targets that are not -100, which are ignored; None: all.
    """
    if length is None:
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    total = torch.stack(
        [
            functional.cross_entropy(part.float().flatten(0, 1), wanted.flatten(), reduction="sum")
            for part, wanted in zip(torch.split(logits, length, dim=1), torch.split(targets, length, dim=1))
        ]
    ).sum()
    loss: torch.Tensor = poptorch.identity_loss(total / (targets.numel() if count is None else count), "none")
    return loss
