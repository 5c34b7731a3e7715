"""What may stand for BatchNorm: group normalisation, or frozen statistics."""

from __future__ import annotations

import math

import torch
from torch import nn

from raypod.errors import ConfigError

_GROUPS = 32  # Wu and He 2018


class FrozenBatchNorm2d(nn.Module):
    """BatchNorm whose statistics, scale and shift stay as they are: buffers by the names of `nn.BatchNorm2d`.

    Fresh it changes nothing (mean 0, variance 1); it is for weights that are loaded and trained further.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[n, channels, h, w] to the same shape."""
        scale = self.weight * torch.rsqrt(self.running_var + self.eps)
        shift = self.bias - self.running_mean * scale
        return inputs * scale[:, None, None] + shift[:, None, None]


def replace_batch_norms(network: nn.Module, norm: str) -> None:
    """Put "group" or "frozen" norms in place of all `nn.BatchNorm2d` of a network.

    Raises:
        ConfigError: the network has none.
    """
    found = [
        (parent, name, part)
        for parent in network.modules()
        for name, part in parent.named_children()
        if isinstance(part, nn.BatchNorm2d)
    ]
    if not found:
        raise ConfigError(f"--norm {norm}: the model has no BatchNorm2d that it could stand for")
    for parent, name, part in found:
        channels = part.num_features
        setattr(parent, name, _group_norm(channels) if norm == "group" else FrozenBatchNorm2d(channels, part.eps))


def _group_norm(channels: int) -> nn.GroupNorm:
    """32 groups, or as many below that as divide the channels."""
    return nn.GroupNorm(math.gcd(_GROUPS, channels), channels)
