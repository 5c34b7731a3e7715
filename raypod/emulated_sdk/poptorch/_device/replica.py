"""One replica at work: the forward of a micro-batch, and its accumulation of gradients."""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager, Dict, List, NamedTuple, Optional

import torch

from poptorch._errors import Error
from poptorch._executor.arguments import Arguments
from poptorch._executor.structure import flatten

from .compilation import Trace
from .dtypes import to_device
from .memory import ReplicaMemory
from .mode import DeviceMode, OnDevice
from .random import device_random

_ON_DEVICE = OnDevice()


class Forward(NamedTuple):
    """What one forward returned, detached, and its final loss (training only)."""

    outputs: List[torch.Tensor]
    loss: Optional[torch.Tensor]


class Replica:
    """Runs micro-batches on one replica's module, always in one thread at a time.

    `index` is the global index of the replica.
    """

    def __init__(self, memory: ReplicaMemory, arguments: Arguments, traced: Trace, index: int) -> None:
        self.memory = memory
        self.micro_batches = 0
        self.seed = 0
        self._arguments = arguments
        self._index = index
        self._traced = traced
        self._mode = None if traced.is_plain else DeviceMode()
        self._constants = [(tensor, tensor._version, tensor.clone()) for tensor in memory.constants.values()]
        groups: List[Dict[str, Any]] = [memory.parameters, memory.buffers, memory.constants]
        self._memory_addresses = frozenset(
            tensor.untyped_storage().data_ptr() for group in groups for tensor in group.values()
        )

    def forward(self, inputs: List[torch.Tensor]) -> Forward:
        """Run the module on one micro-batch, given as views into the combined batch."""
        args, kwargs = self._arguments.rebuild([to_device(tensor) for tensor in inputs])
        self._restore_constants()
        with self._random(), self._mode or _ON_DEVICE:
            tensors, structure = flatten(self.memory.module(*args, **kwargs))
        self.micro_batches += 1
        if structure != self._traced.structure:
            raise Error(f"forward returned {structure}, but {self._traced.structure} when it was compiled")
        return Forward([self._kept(tensor) for tensor in tensors], self._loss(tensors))

    def _loss(self, outputs: List[torch.Tensor]) -> Optional[torch.Tensor]:
        if self._mode is not None:
            return self._mode.marks[-1] if self._mode.marks else None
        return None if self._traced.loss_output is None else outputs[self._traced.loss_output]

    def _random(self) -> ContextManager[Any]:
        if self._traced.draws:
            return device_random(self.seed, self._index, self.micro_batches)
        return contextlib.nullcontext()

    def _kept(self, output: torch.Tensor) -> torch.Tensor:
        # An output may be a weight or a buffer itself, which changes before the call ends.
        detached = output.detach()
        return detached.clone() if detached.untyped_storage().data_ptr() in self._memory_addresses else detached

    def _restore_constants(self) -> None:
        """Integer and bool buffers are compile-time constants: what a forward does to them is lost (contract 2.6)."""
        for index, (tensor, version, value) in enumerate(self._constants):
            if tensor._version != version:
                tensor.copy_(value)
                self._constants[index] = (tensor, tensor._version, value)
