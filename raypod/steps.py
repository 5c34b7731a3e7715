"""The two programs that the replicas run, a training step and an evaluation step, and the IPUs that they lie on."""

from __future__ import annotations

from typing import Any, Sequence, Tuple

import poptorch
import torch
from torch import nn
from torch.nn import functional


class TrainingStep(nn.Module):
    """What a replica does with one micro-batch in training."""

    def __init__(self, network: nn.Module, prepare: nn.Module, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.network, self.prepare, self.label_smoothing = network, prepare, label_smoothing

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Mean cross-entropy (the marked loss) and the number of right predictions, both 0-d."""
        logits = self.network(self.prepare(images)).float()
        loss = functional.cross_entropy(logits, labels)
        if self.label_smoothing:
            # Gradients start at the marked loss: what is added to a torch loss must be marked with it (contract 2.4).
            of_all_classes = -functional.log_softmax(logits, dim=1).mean()
            mixed = (1 - self.label_smoothing) * loss + self.label_smoothing * of_all_classes
            loss = poptorch.identity_loss(mixed, reduction="mean")
        return loss, (logits.argmax(dim=1) == labels).sum()


class EvaluationStep(nn.Module):
    """What a replica does with one micro-batch of the test split."""

    def __init__(self, network: nn.Module, prepare: nn.Module) -> None:
        super().__init__()
        self.network, self.prepare = network, prepare

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits [n, classes], float32."""
        logits: torch.Tensor = self.network(self.prepare(images)).float()
        return logits


def begin_blocks(network: nn.Module, splits: Sequence[str]) -> None:
    """Let the next IPU begin with each of these modules of the network, in their order."""
    for ipu, name in enumerate(splits, start=1):
        poptorch.BeginBlock(network.get_submodule(name), user_id=name, ipu_id=ipu)


def execution_strategy(execution: str) -> Any:
    """How the IPUs of a replica work together: "pipelined" or "sharded" (contract section 3)."""
    return poptorch.PipelinedExecution() if execution == "pipelined" else poptorch.ShardedExecution()
