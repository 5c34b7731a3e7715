"""`SyncBatchNorm`: batch normalisation with the statistics of all ranks' batches (contract section 8).

The real one takes tensors on GPUs only; this one takes those of the CPU.
"""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from horovod.torch._identity import size
from horovod.torch._reduction import ReduceOp
from horovod.torch._synchronous import allreduce


class SyncBatchNorm(_BatchNorm):
    """Like torch.nn.BatchNorm*d for inputs [samples, channels, ...] of any number of dimensions from 2 on.

    In training mode mean and variance are those over all ranks' samples, which may be differently many. The gradients
    of weight and bias are this rank's own, as those of any other layer.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalises; all ranks must call it together in training mode."""
        self._check_input_dim(input)
        is_training = self.training or not self.track_running_stats
        if not is_training or size() == 1:
            return super().forward(input)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        count, sums = input.new_tensor([input.numel() / input.shape[1]]), input.sum(dims)
        totals = allreduce(torch.cat([count, sums]), op=ReduceOp.Sum)
        count = totals[0].detach()
        shape = [1, -1] + [1] * (input.dim() - 2)
        mean = totals[1:] / count
        centred = input - mean.view(shape)
        variance = allreduce((centred * centred).sum(dims), op=ReduceOp.Sum) / count
        self._track(mean.detach(), variance.detach() * count / (count - 1))
        result = centred * torch.rsqrt(variance.view(shape) + self.eps)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Moves the running statistics; `momentum` None means their plain mean over all calls."""
        if not (self.training and self.track_running_stats):
            return
        assert self.running_mean is not None, "it tracks"
        assert self.running_var is not None, "it tracks"
        assert self.num_batches_tracked is not None, "it tracks"
        self.num_batches_tracked.add_(1)
        weight = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean, weight)
        self.running_var.lerp_(variance, weight)
