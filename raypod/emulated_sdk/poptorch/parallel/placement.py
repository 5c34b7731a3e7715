"""The placement of a model on the IPUs of a replica.

Not a part of PopTorch: `executor.emulatedPlacement()` returns it for a compiled model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Collection, Mapping, NamedTuple, Tuple

import torch

from poptorch.parallel.tracing import StageRecorder, StageUse


@dataclass(frozen=True)
class StagePlacement:
    """One forward stage: consecutive operations on one IPU.

    Attributes:
        index: position in the order of execution, from 0.
        ipu: IPU within the replica, from 0. Several stages may share one.
        phase: index of the phase; 0 without phases.
        blocks: ids of its blocks, in the order of execution.
        modules: names of the modules whose own forward has operations here.
        parameters, buffers: names of those stored here, where they are first used.
        parameter_elements: number of elements of the parameters.
        parameter_bytes, buffer_bytes: sizes in the dtypes of the device.
        forward_operations: scalar operations of the forward of one micro-batch, counted from shapes.
    """

    index: int
    ipu: int
    phase: int
    blocks: Tuple[str, ...]
    modules: Tuple[str, ...]
    parameters: Tuple[str, ...]
    buffers: Tuple[str, ...]
    parameter_elements: int
    parameter_bytes: int
    buffer_bytes: int
    forward_operations: int


@dataclass(frozen=True)
class IpuPlacement:
    """One IPU of a replica: the indices of its stages, and the sums over them."""

    ipu: int
    stages: Tuple[int, ...]
    parameters: Tuple[str, ...]
    parameter_elements: int
    parameter_bytes: int
    buffer_bytes: int
    forward_operations: int


@dataclass(frozen=True)
class Placement:
    """A model on the IPUs of one replica.

    Attributes:
        strategy: "pipelined", "sharded", "serial phased" or "parallel phased".
        stages: in the order of execution.
        unused: names of the parameters and buffers that the forward does not use, and that are on no IPU.
    """

    strategy: str
    stages: Tuple[StagePlacement, ...]
    unused: Tuple[str, ...]

    @property
    def ipus_per_replica(self) -> int:
        """Number of IPUs of a replica: all up to the highest number in use."""
        used = {stage.ipu for stage in self.stages}
        return max(len(used), max(used) + 1)

    @property
    def ipus(self) -> Tuple[IpuPlacement, ...]:
        """Every IPU of a replica in order, including those without work."""
        return tuple(self._ipu(ipu) for ipu in range(self.ipus_per_replica))

    def _ipu(self, ipu: int) -> IpuPlacement:
        here = [stage for stage in self.stages if stage.ipu == ipu]
        return IpuPlacement(
            ipu=ipu,
            stages=tuple(stage.index for stage in here),
            parameters=tuple(name for stage in here for name in stage.parameters),
            parameter_elements=sum(stage.parameter_elements for stage in here),
            parameter_bytes=sum(stage.parameter_bytes for stage in here),
            buffer_bytes=sum(stage.buffer_bytes for stage in here),
            forward_operations=sum(stage.forward_operations for stage in here),
        )


class Sizes(NamedTuple):
    """Parameters and buffers of a replica by name, and the ids of those that the device stores in half precision."""

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    half: Collection[int]

    def bytes_of(self, tensor: torch.Tensor) -> int:
        """Return the bytes of a tensor on the device."""
        return tensor.numel() * (2 if id(tensor) in self.half else tensor.element_size())


def place(strategy: str, recorder: StageRecorder, sizes: Sizes) -> Placement:
    """Return the placement of the recorded stages."""
    stages = tuple(_place_stage(index, use, sizes) for index, use in enumerate(recorder.stages()))
    return Placement(strategy, stages, recorder.unused())


def _place_stage(index: int, use: StageUse, sizes: Sizes) -> StagePlacement:
    parameters = {name: sizes.parameters[name] for name in use.tensors if name in sizes.parameters}
    buffers = {name: sizes.buffers[name] for name in use.tensors if name in sizes.buffers}
    return StagePlacement(
        index=index,
        ipu=use.ipu,
        phase=use.phase,
        blocks=use.blocks,
        modules=use.modules,
        parameters=tuple(parameters),
        buffers=tuple(buffers),
        parameter_elements=sum(tensor.numel() for tensor in parameters.values()),
        parameter_bytes=sum(map(sizes.bytes_of, parameters.values())),
        buffer_bytes=sum(map(sizes.bytes_of, buffers.values())),
        forward_operations=use.operations,
    )
