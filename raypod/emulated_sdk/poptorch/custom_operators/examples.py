"""The operators of graphcore/examples: GPT-2, Swin, MAE, Conformer, YOLO and the tutorial on custom operators."""

from __future__ import annotations

from typing import Any

import torch

from poptorch.custom_operators.registry import built_in_emulation


@built_in_emulation("RemapCE")
def remap(x: torch.Tensor, **layout: Any) -> torch.Tensor:
    """Return the tensor itself: the operator spreads it over the tiles of an IPU in another way.

    GPT-2 passes `grain_size` only; Swin, MAE and Conformer that and more for the forward and the backward pass.
    """
    return x


@built_in_emulation("CopyTensor")
def copy(x: torch.Tensor) -> torch.Tensor:
    """Return a copy (YOLO)."""
    return x


@built_in_emulation("LeakyRelu", domain="custom.ops")
def leaky_relu(x: torch.Tensor, alpha: float = 0.01) -> torch.Tensor:
    """Return the negative elements times alpha, and the others as they are (the tutorial on custom operators)."""
    return torch.where(x < 0, alpha * x, x)
