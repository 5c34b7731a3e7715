"""What may stand for BatchNorm: group normalisation, or frozen statistics."""

from __future__ import annotations

import math

import torch
from torch import nn

from raypod.errors import ConfigError

_GROUPS = 32  # Wu and He 2018


class FrozenBatchNorm2d(nn.Module):
    """BatchNorm whose statistics, scale and shift stay as they are in `norm`: buffers by the same names.

    Of a fresh one it changes nothing (mean 0, variance 1); it is for weights that are loaded and trained further.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.eps = norm.eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            held = getattr(norm, name)  # None without an affine map, or without statistics
            fixed = torch.full((norm.num_features,), value) if held is None else held.detach().clone()
            self.register_buffer(name, fixed)

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
        setattr(parent, name, _group_norm(part.num_features) if norm == "group" else FrozenBatchNorm2d(part))


def _group_norm(channels: int) -> nn.GroupNorm:
    """32 groups, or as many below that as divide the channels."""
    return nn.GroupNorm(math.gcd(_GROUPS, channels), channels)
