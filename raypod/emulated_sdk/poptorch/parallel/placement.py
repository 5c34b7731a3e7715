"""The placement of a model on the IPUs of a replica, and its limits.

The limits are those of the SDK: numbers of IPUs, the length of pipelines, and overlapped host I/O. The placement is not
a part of PopTorch: `executor.emulatedPlacement()` returns it for a compiled model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Collection, Mapping, Optional, Tuple

import torch

from poptorch.enums import OutputMode
from poptorch.environment import logger
from poptorch.errors import Error
from poptorch.options import Options, PipelinedExecution, ShardedExecution
from poptorch.options.strategies import BlockId
from poptorch.parallel.tracing import StageRecorder, StageUse

IPUS_PER_PROCESS = 64
_MIN_IO_TILES = 32


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
    blocks: Tuple[BlockId, ...]
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


_Tensors = Mapping[str, torch.Tensor]


def place(strategy: str, recorder: StageRecorder, parameters: _Tensors, buffers: _Tensors) -> Placement:
    """Return the placement of the recorded stages, with the parameters and buffers of a replica."""
    stages = tuple(_place_stage(index, use, parameters, buffers) for index, use in enumerate(recorder.stages()))
    return Placement(strategy, stages, recorder.unused())


def _place_stage(index: int, use: StageUse, parameters: _Tensors, buffers: _Tensors) -> StagePlacement:
    parameters = {name: parameters[name] for name in use.tensors if name in parameters}
    buffers = {name: buffers[name] for name in use.tensors if name in buffers}
    return StagePlacement(
        index=index,
        ipu=use.ipu,
        phase=use.phase,
        blocks=use.blocks,
        modules=use.modules,
        parameters=tuple(parameters),
        buffers=tuple(buffers),
        parameter_elements=sum(tensor.numel() for tensor in parameters.values()),
        parameter_bytes=sum(map(_bytes, parameters.values())),
        buffer_bytes=sum(map(_bytes, buffers.values())),
        forward_operations=use.operations,
    )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def check_number(ipus: int) -> None:
    """Raise Error for more IPUs than one process can use."""
    if ipus > IPUS_PER_PROCESS:
        raise Error(
            f"Too many IPUs requested ({ipus}). Experiments that need more than {IPUS_PER_PROCESS} IPUs require "
            "distributed execution."
        )


def check_placement(placement: Placement, options: Options, is_training: bool) -> None:
    """Raise Error if the placement exceeds the process, the launched IPUs per replica, or the pipeline's length."""
    reserved = _reserved_ipus(placement.ipus_per_replica, options)
    launched: Optional[int] = getattr(options, "_launched_ipus_per_replica", None)
    if launched is not None and reserved != launched * options.replication_factor:
        raise Error(
            f"The model uses {placement.ipus_per_replica} IPUs per replica, but the run was launched with {launched} "
            "(POPDIST_NUM_IPUS_PER_REPLICA): change --ipus-per-replica or the ipu_id of the model's blocks"
        )
    if placement.strategy == PipelinedExecution.name:
        _check_pipeline(len(placement.stages), options, is_training)


def check_overlap(options: Options, overlapped: Collection[str]) -> None:
    """Raise Error unless strategy, I/O tiles and output mode allow overlapped host I/O.

    Args:
        overlapped: "inputs", "outputs", both or neither. The output mode only limits outputs (inferred: the SDK's
            documentation does not state this).
    """
    if not overlapped:
        return
    strategy = options._execution_strategy
    if isinstance(strategy, PipelinedExecution) and not isinstance(strategy, ShardedExecution):
        raise Error(
            "Overlapped IO is not supported with poptorch.PipelinedExecution. If you are using only one IPU, please "
            "switch to poptorch.ShardedExecution."
        )
    locations = options.TensorLocations
    if not locations.exists("numIOTiles") or locations("numIOTiles") < _MIN_IO_TILES:
        raise Error(
            f"No IO tiles allocated. You must allocate at least {_MIN_IO_TILES} IO tiles using "
            "poptorch.Options().TensorLocations.numIOTiles."
        )
    if "outputs" in overlapped and options.output_mode not in (OutputMode.All, OutputMode.Sum):
        raise Error(
            f"Overlapped outputs need OutputMode.All or OutputMode.Sum, not {OutputMode(options.output_mode).name}"
        )


def _reserved_ipus(ipus_per_replica: int, options: Options) -> int:
    """Return the IPUs that a process reserves: a power of two, at most 64."""
    needed: int = ipus_per_replica * options.replication_factor
    check_number(needed)
    reserved = 1 << (needed - 1).bit_length()
    if reserved == needed:
        return needed
    what = f"{ipus_per_replica} IPUs per replica x {options.replication_factor} replicas = {needed} IPUs"
    if not options.auto_round_num_ipus:
        raise Error(
            f"{what}. The model specifies the use of {needed} IPUs, however PopTorch must reserve a minimum of "
            f"{reserved} in order to allow the model to run, because PopTorch must reserve a power of 2 or maximum of "
            f"{IPUS_PER_PROCESS} IPUs per process. Please reconfigure your model to use a different number of IPUs or "
            "set poptorch.Options().autoRoundNumIPUs(True)."
        )
    logger.warning("The model uses %s; %d are reserved", what, reserved)
    return reserved


def _check_pipeline(forward_stages: int, options: Options, is_training: bool) -> None:
    depth = 2 * forward_stages - 1 if is_training else forward_stages
    given = options.Training.gradient_accumulation if is_training else options.device_iterations
    if forward_stages == 1 or given >= depth:
        return
    if is_training:
        setter = "Training.gradientAccumulation"
        note = (
            f" Please note that a model with {forward_stages} pipeline stages in PopTorch will have an additional "
            f"{forward_stages - 1} stages when training."
        )
    else:
        setter, note = "deviceIterations", ""
    raise Error(
        f"poptorch.Options().{setter} must be greater than or equal to the number of pipeline stages ({depth}) when "
        f"using poptorch.PipelinedExecution.{note} {setter} is {given}: set it to {depth} or more, or use "
        "poptorch.ShardedExecution"
    )
