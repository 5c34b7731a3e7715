"""What compiling finds out about a forward, and what it refuses (contract 2.4, 2.6)."""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch

from poptorch._device.anchors import Watch
from poptorch._device.dtypes import to_device
from poptorch._device.half import HalfTracker
from poptorch._device.loss_rule import ancestors, final_loss
from poptorch._device.memory import ReplicaMemory
from poptorch._device.mode import DeviceMode
from poptorch._device.python_state import PythonState
from poptorch._device.random import DrawsInside, detect_random
from poptorch._errors import Error
from poptorch._executor.arguments import Arguments
from poptorch._executor.outputs import api_dtypes
from poptorch._executor.structure import Structure, flatten
from poptorch._ops.overlap import check_transfers
from poptorch._parallel.blocks import block_of
from poptorch._parallel.placement import Placement, Sizes, place
from poptorch._parallel.strategies import _IExecutionStrategy
from poptorch._parallel.tracing import StageRecorder
from poptorch.enums import OverlapMode


class Checks(NamedTuple):
    """What a compilation insists on, and the strategy by which it reads blocks."""

    is_training: bool
    refuse_changed_buffers: bool
    strategy: _IExecutionStrategy


class Trace(NamedTuple):
    """What is known of a forward.

    Attributes:
        structure: how its outputs nest.
        dtypes: those of the outputs at the API.
        draws: whether it draws random numbers.
        backward_draws: whether the backward pass does too, as it recomputes part of the forward.
        is_plain: whether it does the same without a `DeviceMode`.
        asks_for_half: whether it looks at the dtypes of tensors that would be half.
        loss_output: which output is the final loss itself, if any.
        trained: the parameters that the loss depended on; empty for inference.
        changed_modules: the modules, by name, whose Python attributes it changes.
        changed_inputs: the tensors of the arguments that it changes in place.
        placement: what lies on which IPU.
        tensor_names: the tensors that can be anchored.
        overlapped: "inputs", "outputs" or both, where their transfers were asked to overlap with compute.
        half_on_host: what layers on the host take in half.
    """

    structure: Structure
    dtypes: List[torch.dtype]
    draws: bool
    backward_draws: bool
    is_plain: bool
    asks_for_half: bool
    loss_output: Optional[int]
    trained: FrozenSet[str]
    changed_modules: Tuple[str, ...]
    changed_inputs: Tuple[int, ...]
    placement: Placement
    overlapped: FrozenSet[str]
    half_on_host: Dict[str, List[bool]]
    tensor_names: Tuple[str, ...]


def trace(scratch: ReplicaMemory, arguments: Arguments, inputs: Sequence[torch.Tensor], checks: Checks) -> Trace:
    """Run the forward once on one micro-batch, on a replica made for this. Generators are as before afterwards.

    Error when the loss rule of training is broken, or when parameters or buffers are used in a way that the device
    cannot follow.
    """
    tensors = [to_device(tensor) for tensor in inputs]
    mode, tracker = DeviceMode(is_compiling=True), HalfTracker(half_of(tensors, inputs, scratch))
    recorder = StageRecorder(scratch.module, checks.strategy, block_of)
    watch = Watch(scratch.module)
    args, kwargs = arguments.rebuild(tensors)
    python_state, tensors_before = PythonState(scratch.module), _Tensors(scratch)
    versions = [tensor._version for tensor in tensors]
    backward_draws = False
    trained: FrozenSet[str] = frozenset()
    with torch.set_grad_enabled(checks.is_training), detect_random() as generator:
        watch.begin(arguments.compiled.names, tensors)
        with recorder, mode, tracker:
            outputs, structure = flatten(scratch.module(*args, **kwargs))
        check_transfers(mode.overlaps, tensors, outputs)
        tensors_before.check(scratch.module, mode, checks)
        if checks.is_training:
            loss = final_loss(mode.marks)
            trained = _trained(scratch, loss)
            backward_draws = generator.has_drawn_so_far() and _backward_draws(loss)
    loss_output = _loss_output(outputs, mode)
    return Trace(
        structure=structure,
        dtypes=api_dtypes(outputs, [tracker.is_half(output) for output in outputs]),
        draws=generator.has_drawn,
        backward_draws=backward_draws,
        is_plain=not mode.has_replaced and (loss_output is not None or not checks.is_training),
        asks_for_half=tracker.was_asked,
        loss_output=loss_output,
        trained=trained,
        placement=place(checks.strategy.name, recorder, _sizes(scratch)),
        overlapped=_overlapped(mode),
        tensor_names=watch.names,
        changed_modules=python_state.changed(),
        changed_inputs=tuple(index for index, tensor in enumerate(tensors) if tensor._version != versions[index]),
        half_on_host=mode.half_on_host,
    )


def _overlapped(mode: DeviceMode) -> FrozenSet[str]:
    asked = [overlap for overlap in mode.overlaps if overlap.mode != OverlapMode.NoOverlap]
    return frozenset("inputs" if overlap.is_input else "outputs" for overlap in asked)


def _sizes(memory: ReplicaMemory) -> Sizes:
    return Sizes(memory.parameters, memory.buffers, frozenset(map(id, memory.half_tensors)))


def half_of(on_device: Sequence[torch.Tensor], given: Sequence[torch.Tensor], memory: ReplicaMemory) -> List[Any]:
    """Of a forward's inputs and a replica's memory, the tensors that would be half."""
    inputs = [tensor for tensor, from_host in zip(on_device, given) if from_host.dtype == torch.half]
    return [*inputs, *memory.half_tensors]


class _Mark(NamedTuple):
    """By which a changed tensor is known. Changes through `.data` show in the sum alone, of which there is a text so
    that NaN equals itself.
    """

    version: int
    address: int
    total: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Mark:
        with torch.no_grad():
            return cls(tensor._version, tensor.data_ptr(), str(tensor.sum().item()))


class _Tensors:
    """A module's parameters and buffers before the forward."""

    def __init__(self, memory: ReplicaMemory) -> None:
        self._parameters: Dict[str, torch.Tensor] = dict(memory.parameters)
        self._buffers = {**memory.buffers, **memory.constants}
        self._before = {id(tensor): _Mark.of(tensor) for tensor in self._all().values()}

    def check(self, module: torch.nn.Module, mode: DeviceMode, checks: Checks) -> None:
        """Error for what the device cannot follow."""
        after: Dict[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for kind, tensors in (("parameter", self._parameters), ("buffer", self._buffers)):
            for name, tensor in tensors.items():
                if after.get(name) is not tensor or tensor.data_ptr() != self._before[id(tensor)].address:
                    raise Error(
                        f"The {kind} {name!r} was reassigned within the model's forward(), which the device cannot "
                        f"follow. Consider changing it in place: self.{name}.copy_(value)"
                    )
        for name in self._changed(self._parameters, set()):
            raise Error(
                f"forward changes the parameter {name!r} in place, but on the device only the optimizer does that: "
                "make it a buffer, or change it on the host and call copyWeightsToDevice()"
            )
        statistics = {id(tensor) for tensor in mode.statistics}
        for name in self._changed(self._buffers, statistics) if checks.refuse_changed_buffers else ():
            raise Error(
                "PopTorch does not support broadcasting buffers. If your model is able to tolerate buffers becoming "
                "out of sync between replicas, you can disable buffer broadcasting using "
                f"poptorch.Options.broadcastBuffers(False). Here forward changes the buffer {name!r}"
            )

    def _all(self) -> Dict[str, torch.Tensor]:
        return {**self._parameters, **self._buffers}

    def _changed(self, tensors: Dict[str, torch.Tensor], allowed: Set[int]) -> List[str]:
        return [
            name
            for name, tensor in tensors.items()
            if tensor.is_floating_point() and id(tensor) not in allowed and _Mark.of(tensor) != self._before[id(tensor)]
        ]


def _loss_output(outputs: List[torch.Tensor], mode: DeviceMode) -> Optional[int]:
    """Which output is the final loss as it was marked, not changed in place since."""
    for index, output in enumerate(outputs):
        if mode.passed_on and output is mode.passed_on[-1] and output._version == 0:
            return index
    return None


def _trained(memory: ReplicaMemory, loss: torch.Tensor) -> FrozenSet[str]:
    """The parameters whose gradients the backward pass from the loss is seen to reach."""
    reached = {id(getattr(node, "variable", None)) for node in ancestors(loss)}
    return frozenset(name for name, parameter in memory.parameters.items() if id(parameter) in reached)


def _backward_draws(loss: torch.Tensor) -> bool:
    """Whether the backward pass draws random numbers; the gradients go to the scratch replica."""
    if not loss.requires_grad:
        return False
    inside = DrawsInside()  # type: ignore[no-untyped-call]
    with inside:
        torch.autograd.backward(loss)
    return bool(inside.has_drawn)
