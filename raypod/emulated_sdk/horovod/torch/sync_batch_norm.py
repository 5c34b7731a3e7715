"""`SyncBatchNorm`: batch normalization with the statistics of the batches of all ranks.

Horovod's own class takes GPU tensors only; this one takes CPU tensors.
"""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from horovod.torch.mpi_ops import Sum, allreduce, size


class SyncBatchNorm(_BatchNorm):
    """Like torch.nn.BatchNorm*d, for inputs [samples, channels, ...] of two or more dimensions.

    In training mode, mean and variance are those of the samples of all ranks, whose numbers may differ. The gradients
    of weight and bias are local to the rank, as for any other layer.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalized input; in training mode all ranks must call it."""
        self._check_input_dim(input)
        is_training = self.training or not self.track_running_stats
        if not is_training or size() == 1:
            return super().forward(input)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        count, sums = input.new_tensor([input.numel() / input.shape[1]]), input.sum(dims)
        totals = allreduce(torch.cat([count, sums]), op=Sum)
        count = totals[0].detach()
        shape = [1, -1] + [1] * (input.dim() - 2)
        mean = totals[1:] / count
        centered = input - mean.view(shape)
        variance = allreduce((centered * centered).sum(dims), op=Sum) / count
        self._update_statistics(mean.detach(), variance.detach() * count / (count - 1))
        result = centered * torch.rsqrt(variance.view(shape) + self.eps)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _update_statistics(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Update the running statistics; `momentum` None means the cumulative average."""
        if not (self.training and self.track_running_stats):
            return
        assert self.running_mean is not None, "track_running_stats is set"
        assert self.running_var is not None, "track_running_stats is set"
        assert self.num_batches_tracked is not None, "track_running_stats is set"
        self.num_batches_tracked.add_(1)
        weight = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean, weight)
        self.running_var.lerp_(variance, weight)
