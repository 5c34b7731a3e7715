"""A user's model whose second instance ends by an uncaught C++ exception if the file `throw` exists, once."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch
from torch import nn


class Model(nn.Module):
    """A linear layer."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(channels * 64, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if os.environ.get("POPDIST_REPLICA_INDEX_OFFSET") == "2" and Path("throw").exists():
            Path("throw").unlink(missing_ok=True)  # both replicas of the instance can get here at the same time
            # std::__throw_runtime_error(char const*): no frame of this process catches the exception.
            ctypes.CDLL("libstdc++.so.6")["_ZSt21__throw_runtime_errorPKc"](b"the device is gone")
        logits: torch.Tensor = self.head(images.flatten(1))
        return logits


def model(channels: int, classes: int) -> nn.Module:
    """Return the model, for --model."""
    return Model(channels, classes)
