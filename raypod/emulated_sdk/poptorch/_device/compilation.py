"""What compiling finds out about a forward, and what it refuses (contract 2.4, 2.6)."""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager, Dict, FrozenSet, Iterator, List, NamedTuple, Optional, Sequence, Set

import torch

from poptorch._errors import Error
from poptorch._executor.arguments import Arguments
from poptorch._executor.outputs import api_dtypes
from poptorch._executor.structure import Structure, flatten

from .dtypes import to_device
from .half import HalfTracker
from .loss_rule import ancestors, final_loss
from .memory import ReplicaMemory
from .mode import DeviceMode
from .random import detect_random


class Checks(NamedTuple):
    """What a compilation insists on."""

    is_training: bool
    refuse_changed_buffers: bool


class Trace(NamedTuple):
    """What is known of a forward.

    Attributes:
        structure: how its outputs nest.
        dtypes: those of the outputs at the API.
        draws: whether it draws random numbers.
        is_plain: whether it does the same without a `DeviceMode`.
        loss_output: which output is the final loss itself, if any.
        trained: the parameters that the loss depends on; empty for inference.
    """

    structure: Structure
    dtypes: List[torch.dtype]
    draws: bool
    is_plain: bool
    loss_output: Optional[int]
    trained: FrozenSet[str]


def trace(memory: ReplicaMemory, arguments: Arguments, inputs: Sequence[torch.Tensor], checks: Checks) -> Trace:
    """Run the forward once on one micro-batch; buffers and generators are as before afterwards.

    Error when the loss rule of training is broken, or when buffers are used in a way that the device cannot follow.
    """
    tensors = [to_device(tensor) for tensor in inputs]
    half = [tensor for tensor, given in zip(tensors, inputs) if given.dtype == torch.half] + memory.half_tensors
    mode, tracker = DeviceMode(is_compiling=True), HalfTracker(half)
    follow_half: ContextManager[Any] = tracker if half else contextlib.nullcontext()
    args, kwargs = arguments.rebuild(tensors)
    trained: FrozenSet[str] = frozenset()
    with _unchanged(memory.module) as before, torch.set_grad_enabled(checks.is_training), detect_random() as generator:
        with mode, follow_half:
            outputs, structure = flatten(memory.module(*args, **kwargs))
        _check_buffers(memory.module, before, mode, checks)
        if checks.is_training:
            trained = _trained(memory, final_loss(mode.marks))
    loss_output = _loss_output(outputs, mode)
    return Trace(
        structure=structure,
        dtypes=api_dtypes(outputs, [tracker.is_half(output) for output in outputs]),
        draws=generator.has_drawn,
        is_plain=not mode.has_replaced and (loss_output is not None or not checks.is_training),
        loss_output=loss_output,
        trained=trained,
    )


class _Buffer(NamedTuple):
    tensor: torch.Tensor
    version: int
    value: torch.Tensor


@contextlib.contextmanager
def _unchanged(module: torch.nn.Module) -> Iterator[Dict[str, _Buffer]]:
    """Yields the module's buffers by name, and gives them their values back in the end."""
    buffers = {name: _Buffer(tensor, tensor._version, tensor.clone()) for name, tensor in module.named_buffers()}
    try:
        yield buffers
    finally:
        with torch.no_grad():
            for buffer in buffers.values():
                buffer.tensor.copy_(buffer.value)


def _check_buffers(module: torch.nn.Module, before: Dict[str, _Buffer], mode: DeviceMode, checks: Checks) -> None:
    after = dict(module.named_buffers())
    rebound = [name for name, buffer in before.items() if after.get(name) is not buffer.tensor]
    if rebound:
        raise Error(
            f"forward assigns a new tensor to the buffer {rebound[0]!r}: change it in place, as buffer.copy_(value)"
        )
    changed = _changed(before, {id(tensor) for tensor in mode.statistics})
    if changed and checks.refuse_changed_buffers:
        raise Error(
            f"forward changes the buffer {changed[0]!r}, and with more than one input group the replicas' copies would "
            "drift apart. If that is meant, call options.broadcastBuffers(False)"
        )


def _changed(buffers: Dict[str, _Buffer], statistics: Set[int]) -> List[str]:
    return [
        name
        for name, buffer in buffers.items()
        if buffer.tensor.is_floating_point()
        and buffer.tensor._version != buffer.version
        and id(buffer.tensor) not in statistics
    ]


def _loss_output(outputs: List[torch.Tensor], mode: DeviceMode) -> Optional[int]:
    """Which output is the final loss as it was marked, not changed in place since."""
    for index, output in enumerate(outputs):
        if mode.passed_on and output is mode.passed_on[-1] and output._version == 0:
            return index
    return None


def _trained(memory: ReplicaMemory, loss: torch.Tensor) -> FrozenSet[str]:
    """The parameters whose gradients the backward pass from the loss reaches."""
    reached = {id(getattr(node, "variable", None)) for node in ancestors(loss)}
    return frozenset(name for name, parameter in memory.parameters.items() if id(parameter) in reached)
