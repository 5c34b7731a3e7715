"""Small modules and options for the tests of the emulated `poptorch`."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional

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


class Apply(nn.Module):
    """Calls a function with its inputs; with parts, which become its attributes, also with itself as the first."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function, self.has_parts = function, bool(parts)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs) if self.has_parts else self.function(*args, **kwargs)


def options(replicas: int = 1, accumulation: int = 1, iterations: int = 1) -> poptorch.Options:
    """Return options without a progress bar, for any number of replicas."""
    chosen = poptorch.Options().showCompilationProgressBar(False).autoRoundNumIPUs()
    chosen.replicationFactor(replicas).deviceIterations(iterations)
    chosen.Training.gradientAccumulation(accumulation)
    return chosen


def wrapped(
    model: nn.Module, opts: Optional[poptorch.Options] = None, algorithm: str = "SGD", lr: float = 0.1, **values: Any
) -> poptorch.PoplarExecutor:
    """Return the executor that trains a model with an optimizer of `poptorch.optim`."""
    optimizer = getattr(poptorch.optim, algorithm)(model.parameters(), lr=lr, **values)
    return poptorch.trainingModel(model, opts or options(), optimizer)


def trained(model: Any, *inputs: torch.Tensor, **arguments: Any) -> Any:
    """Return a model after one call of its training, with the arguments of `wrapped`."""
    wrapped(model, **arguments)(*inputs)
    return model


def on_device(
    function: Callable[..., Any], *inputs: Any, opts: Optional[poptorch.Options] = None, **kwargs: Any
) -> Any:
    """Return what a function returns in an inference model."""
    return poptorch.inferenceModel(Apply(function), opts or options())(*inputs, **kwargs)


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
    try:
        algorithm([nn.Parameter(torch.zeros(1))], lr=0.1, fused=True)
    except (RuntimeError, TypeError):  # not for CPU tensors, or unknown to this torch
        return {}
    return {"fused": True}
