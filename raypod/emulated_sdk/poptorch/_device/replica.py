"""One replica at work: the forward of a micro-batch, and its accumulation of gradients."""

from __future__ import annotations

import contextlib
import time
from typing import Any, ContextManager, Dict, List, NamedTuple, Optional, Sequence

import torch

from poptorch._device.anchors import Watch
from poptorch._device.compilation import Trace, half_of
from poptorch._device.dtypes import to_device
from poptorch._device.half import HalfTracker
from poptorch._device.memory import ReplicaMemory
from poptorch._device.mode import DeviceMode, OnDevice
from poptorch._device.python_state import PythonState
from poptorch._device.random import device_random
from poptorch._errors import Error
from poptorch._executor.arguments import Arguments
from poptorch._executor.structure import flatten

_ON_DEVICE = OnDevice()
_NOTHING: ContextManager[Any] = contextlib.nullcontext()


class Forward(NamedTuple):
    """What one forward returned, detached, and its final loss (training only)."""

    outputs: List[torch.Tensor]
    loss: Optional[torch.Tensor]


class Replica:
    """Runs micro-batches on one replica's module, always in one thread at a time.

    `index` is the global index of the replica, `anchored` the names of the tensors for its `watch`, if any. When the
    inputs of the last micro-batch had arrived, `inputs_complete_s` says by `time.perf_counter`.
    """

    def __init__(
        self, memory: ReplicaMemory, arguments: Arguments, traced: Trace, index: int, anchored: Sequence[str] = ()
    ) -> None:
        self.memory = memory
        self.watch = Watch(memory.module, anchored) if anchored else None
        self.inputs_complete_s = 0.0
        self.micro_batches = 0
        self.seed = 0
        self._arguments = arguments
        self._index = index
        self._traced = traced
        self._mode = None if traced.is_plain else DeviceMode(half_on_host=traced.half_on_host)
        self._python_state = PythonState(memory.module, traced.changed_modules)
        self.take_constants()
        groups: List[Dict[str, Any]] = [memory.parameters, memory.buffers, memory.constants]
        self._memory_addresses = frozenset(
            tensor.untyped_storage().data_ptr() for group in groups for tensor in group.values()
        )

    def forward(self, inputs: List[torch.Tensor]) -> Forward:
        """Run the module on one micro-batch, given as views into the combined batch."""
        on_device = [to_device(tensor) for tensor in inputs]
        self.inputs_complete_s = time.perf_counter()
        if self.watch is not None:
            self.watch.begin(self._arguments.compiled.names, on_device)
        args, kwargs = self._arguments.rebuild(on_device)
        self._restore_constants()
        asks = self._traced.asks_for_half
        follow_half: ContextManager[Any] = HalfTracker(half_of(on_device, inputs, self.memory)) if asks else _NOTHING
        try:
            with self._random(self._traced.draws), self._mode or _ON_DEVICE, follow_half:
                tensors, structure = flatten(self.memory.module(*args, **kwargs))
        finally:
            self._python_state.restore()
        self.micro_batches += 1
        self._return_changed(on_device, inputs)
        if structure != self._traced.structure:
            raise Error(f"forward returned {structure}, but {self._traced.structure} when it was compiled")
        return Forward([self._kept(tensor) for tensor in tensors], self._loss(tensors))

    def _loss(self, outputs: List[torch.Tensor]) -> Optional[torch.Tensor]:
        if self._mode is not None:
            return self._mode.marks[-1] if self._mode.marks else None
        return None if self._traced.loss_output is None else outputs[self._traced.loss_output]

    def backward_random(self) -> ContextManager[Any]:
        """Surrounds the backward pass of the micro-batch that ran last."""
        return self._random(self._traced.backward_draws)

    def _random(self, draws: bool) -> ContextManager[Any]:
        if draws:
            return device_random(self.seed, self._index, self.micro_batches)
        return _NOTHING

    def _return_changed(self, on_device: List[torch.Tensor], inputs: List[torch.Tensor]) -> None:
        """Inputs that forward changes in place are changed in the caller's tensors too [inferred: contract silent]."""
        for index in self._traced.changed_inputs:
            with torch.no_grad(), torch.inference_mode(inputs[index].is_inference()):
                inputs[index].copy_(on_device[index])

    def _kept(self, output: torch.Tensor) -> torch.Tensor:
        # An output may be a weight or a buffer itself, which changes before the call ends.
        detached = output.detach()
        return detached.clone() if detached.untyped_storage().data_ptr() in self._memory_addresses else detached

    def take_constants(self) -> None:
        """What the constant buffers hold now is what forwards see from now on."""
        self._constants = [(tensor, tensor._version, tensor.clone()) for tensor in self.memory.constants.values()]

    def _restore_constants(self) -> None:
        """Integer and bool buffers are compile-time constants: what a forward does to them is lost (contract 2.6)."""
        for index, (tensor, version, value) in enumerate(self._constants):
            if tensor._version != version:
                tensor.copy_(value)
                self._constants[index] = (tensor, tensor._version, value)
