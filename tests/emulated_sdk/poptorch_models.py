"""Small modules and options for the tests of the emulated `poptorch`."""

from __future__ import annotations

import inspect
from typing import Any, Dict

import poptorch
import torch
import torch.nn.functional as F
from torch import nn


class Classifier(nn.Module):
    """A convolution, batch normalization and a linear layer. Returns logits, with labels also their loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(4, 5)

    def forward(self, images: torch.Tensor, labels: Any = None) -> Any:
        features = F.relu(self.norm(self.conv(images))).mean((2, 3))
        logits = self.linear(self.dropout(features))
        return logits if labels is None else (logits, F.cross_entropy(logits, labels))


class Echo(nn.Module):
    """Returns its input and the sum of the scaled input as loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> Any:
        return x, poptorch.identity_loss((x * self.scale), "sum")


class Line(nn.Module):
    """Returns the mean of weight * x as loss: its gradient is the mean of x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.weight * x, "mean")


def options(replicas: int = 1, accumulation: int = 1, iterations: int = 1) -> poptorch.Options:
    """Return options without a progress bar, for any number of replicas."""
    chosen = poptorch.Options().showCompilationProgressBar(False).autoRoundNumIPUs()
    chosen.replicationFactor(replicas).deviceIterations(iterations)
    chosen.Training.gradientAccumulation(accumulation)
    return chosen


def seeded(factory: Any = Classifier, **kwargs: Any) -> Any:
    """Return a module with the same weights every time."""
    torch.manual_seed(7)
    return factory(**kwargs)


def batch(samples: int, seed: int = 0) -> Any:
    """Return images [samples, 3, 6, 6] float32 and labels [samples] int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 3, 6, 6, generator=generator), torch.arange(samples) % 5


def fastest(algorithm: Any) -> Dict[str, bool]:
    """Return the arguments that select the device's kernel: fused if torch has it for CPU tensors."""
    if "fused" in inspect.signature(algorithm).parameters and "foreach" in inspect.signature(algorithm).parameters:
        try:
            algorithm([nn.Parameter(torch.zeros(1))], lr=0.1, fused=True)
        except RuntimeError:
            return {}
        return {"fused": True}
    return {}
