"""The combined batch: which samples which replica gets, and when (contract 2.2, 13.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import torch

from poptorch._errors import Error
from poptorch.enums import CommGroupType
from poptorch.options import Options


@dataclass(frozen=True)
class BatchLayout:
    """Dimension 0 of every input is [device iterations, accumulation steps, input groups, micro-batch].

    Without input groups there are as many blocks per step as replicas, the replica innermost.
    """

    device_iterations: int
    accumulation_steps: int
    replicas: int
    group_size: int
    group_type: CommGroupType

    @classmethod
    def of(cls, options: Options) -> BatchLayout:
        """The layout that options ask for; Error when the input groups do not fit."""
        layout = cls(
            device_iterations=options.device_iterations,
            accumulation_steps=options.Training.gradient_accumulation,
            replicas=options.replication_factor,
            group_size=options.input_group_size,
            group_type=options.input_group_type,
        )
        layout._check_groups()
        return layout

    @property
    def input_groups(self) -> int:
        """Groups of replicas with an input of their own."""
        return self.replicas // self.group_size

    @property
    def input_blocks(self) -> int:
        """Micro-batches in every input of a call."""
        return self.device_iterations * self.accumulation_steps * self.input_groups

    def block(self, iteration: int, step: int, replica: int) -> int:
        """Which block of the inputs a replica reads at an accumulation step of an iteration."""
        consecutive = self.group_type != CommGroupType.Orthogonal
        group = replica // self.group_size if consecutive else replica % self.input_groups
        return (iteration * self.accumulation_steps + step) * self.input_groups + group

    def cut(self, tensors: Sequence[torch.Tensor], block: int) -> list[torch.Tensor]:
        """Block number `block` of every tensor, as views; a 0-d tensor is its own only block."""
        return [_cut(tensor, block, self.input_blocks) for tensor in tensors]

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """AssertionError unless dimension 0 of every tensor is a multiple of the number of blocks."""
        for index, tensor in enumerate(tensors):
            size = tensor.shape[0] if tensor.dim() else 1
            fits = size > 0 and size % self.input_blocks == 0
            assert fits, (
                f"Invalid batch dimension: tensor {index} of the arguments has {size} samples, no positive multiple of "
                f"{self.input_blocks} = {self.device_iterations} device iterations x {self.accumulation_steps} "
                f"gradient accumulation x {self.input_groups} replicas or input groups"
            )

    def _check_groups(self) -> None:
        if self.replicas % self.group_size:
            raise Error(f"The input group size {self.group_size} does not divide the {self.replicas} replicas")
        if self.group_size > 1 and self.device_iterations * self.accumulation_steps > 1:
            # Upstream is tested without loops only and would interleave the blocks wrongly (contract 2.2).
            raise Error(
                f"Input groups of {self.group_size} replicas need 1 device iteration and gradient accumulation 1, not "
                f"{self.device_iterations} and {self.accumulation_steps}"
            )


def _cut(tensor: torch.Tensor, block: int, blocks: int) -> torch.Tensor:
    if tensor.dim() == 0:
        return tensor
    size = tensor.shape[0] // blocks
    return tensor.narrow(0, block * size, size)
