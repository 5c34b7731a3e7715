"""Parameters that are moving averages of others: forward requests an update, the weight update makes it.

PopART moves such an update out of the accumulation, so it happens once per weight update.
"""

from __future__ import annotations

from typing import Iterable, Mapping, NamedTuple

import torch

_REQUEST = "_requested_average"  # an attribute of parameters


class _Request(NamedTuple):
    weight: torch.Tensor
    factor: torch.Tensor


def updated(average: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return factor x average + (1 - factor) x weight."""
    return factor * average + (1 - factor) * weight


def request(average: torch.nn.Parameter, weight: torch.Tensor, factor: torch.Tensor) -> None:
    """Update a parameter in the next weight update; the last request of a parameter before it counts."""
    setattr(average, _REQUEST, _Request(weight.detach(), factor.detach()))


@torch.no_grad()
def apply(parameters: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
    """Make the updates that a forward with `parameters` has requested, in `weights` (float32 for half)."""
    for name, parameter in parameters.items():
        requested = vars(parameter).pop(_REQUEST, None)
        if requested is not None:
            new = updated(weights[name], requested.weight.to(weights[name].dtype), requested.factor)
            weights[name].copy_(new)


def discard(parameters: Iterable[torch.Tensor]) -> None:
    """Discard the requests of a failed call."""
    for parameter in parameters:
        vars(parameter).pop(_REQUEST, None)
