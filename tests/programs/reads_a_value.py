"""A PopTorch program whose model reads the value of a tensor, which an IPU rejects."""

import poptorch
import torch


class ReadsAValue(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


print(poptorch.inferenceModel(ReadsAValue())(torch.ones(2)).tolist())
