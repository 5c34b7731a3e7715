"""The task: image classification. Loss, per-micro-batch metrics and evaluation sums.

Another task replaces this module.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Tuple

import torch
from torch.nn import functional

from raypod.events import EvaluationReport


def training_outputs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float,
    mark_loss: Callable[[torch.Tensor], torch.Tensor],
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return the mean cross-entropy, which is the loss, and the number of correct predictions; both 0-d.

    This runs on the device.

    Args:
        logits: float32 [n, classes].
        labels: [n].
        label_smoothing: the weight of the mean over all classes in the loss.
        mark_loss: marks a loss that is composed of several terms, for the device's backward pass.
    """
    loss = functional.cross_entropy(logits, labels)
    if label_smoothing:
        of_all_classes = -functional.log_softmax(logits, dim=1).mean()
        loss = mark_loss((1 - label_smoothing) * loss + label_smoothing * of_all_classes)
    return loss, (logits.argmax(dim=1) == labels).sum()


def replica_results(outputs: Tuple[torch.Tensor, torch.Tensor], shape: Tuple[int, int, int]) -> Dict[str, Any]:
    """Return the fields `losses` and `correct` of a `CallReport`: a value per update and local replica.

    Args:
        outputs: the `training_outputs` of all micro-batches of a call; each [micro-batches].
        shape: the number of updates, of micro-batches per update, and of local replicas.
    """
    losses, correct = outputs
    mean_losses = losses.double().reshape(shape).mean(dim=1).tolist()
    counts = correct.to(torch.int64).reshape(shape).sum(dim=1).tolist()
    return {"losses": tuple(tuple(row) for row in mean_losses), "correct": tuple(tuple(row) for row in counts)}


class EvaluationSums:
    """The sums over the test samples of one instance, on the host."""

    def __init__(self) -> None:
        self._samples = self._correct = 0
        self._losses: List[float] = []

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a batch: logits float32 [n, classes], labels [n] of any integer type."""
        targets = labels.to(torch.int64)
        self._losses.extend(functional.cross_entropy(logits, targets, reduction="none").tolist())
        self._correct += int((logits.argmax(dim=1) == targets).sum())
        self._samples += len(labels)

    def report(self, instance: int) -> EvaluationReport:
        """Return the sums over all batches. The losses are summed exactly, so their order has no effect."""
        return EvaluationReport(instance, self._samples, self._correct, math.fsum(self._losses))
