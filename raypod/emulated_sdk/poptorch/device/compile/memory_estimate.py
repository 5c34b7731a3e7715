"""An estimate of the memory that a compiled model needs on each IPU, from its trace and its schedule.

It is not the SDK's: code, exchange and the layout of tensors on the tiles are known to its compiler only, and are a
fixed share of the memory here.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from poptorch import findings
from poptorch.environment import logger
from poptorch.findings import reject
from poptorch.optimizers.hyperparameters import Hyperparameters
from poptorch.options import Options, PipelinedExecution, ShardedExecution
from poptorch.parallel.placement import Placement, StagePlacement
from poptorch.parallel.tracing import StageActivations

MEMORY_BYTES = 918_000_000  # of a Mk2 IPU: 1472 tiles with 624 kB each, in decimal units
CODE_SHARE = 0.2  # of the memory, for code, exchange and buffers of streams: calibrated, see the documentation
WARNING_SHARE = 0.85
_RESIDENT_SIZE = 2**16  # tensors of fewer elements stay on the chip (inferred)

# Values of PopART's `autoRecomputation`.
_STANDARD, _NORM_ONLY, _PIPELINE, _ALL = 1, 2, 3, 4
_SHARE_WITHOUT_NORMS = 0.5  # of the activations, if norms and nonlinearities are computed again (inferred)


Stages = Sequence[Tuple[int, Sequence[int]]]


class IpuMemory(NamedTuple):
    """The estimated bytes on one IPU, at the time of the largest need.

    Attributes:
        ipu: IPU within the replica.
        weights: parameters and buffers.
        gradients: accumulated gradients; without accumulation those of the largest parameter.
        optimizer: state of the optimizer.
        activations: activations of all micro-batches in flight, copies of weights in half precision, and the operands
            of the largest operator.
        code: code, exchange and buffers of streams: a fixed share of the memory.
    """

    ipu: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    code: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self[1:])

    @property
    def share(self) -> float:
        """The part of the memory of a Mk2 IPU that is in use; above 1 if it does not suffice."""
        return self.total / self.available

    @property
    def available(self) -> int:
        """The bytes of a Mk2 IPU."""
        return MEMORY_BYTES

    @property
    def is_nearly_full(self) -> bool:
        """Whether the share is one of which the compilation warns."""
        return self.share > WARNING_SHARE


class Usage(NamedTuple):
    """What the memory depends on besides the options.

    Attributes:
        parameters: elements of each parameter on the device, by name.
        trained: names of the parameters that are trained; empty for inference.
        optimizer: the optimizer; None for inference.
        replicas: number of replicas of a process, among which sharded tensors are divided.
    """

    parameters: Mapping[str, torch.Tensor]
    trained: FrozenSet[str]
    optimizer: Optional[Hyperparameters]
    replicas: int


def estimate_memory(
    placement: Placement,
    activations: Sequence[StageActivations],
    options: Options,
    usage: Usage,
    micro_batch_factor: float = 1.0,
    is_pipeline: Optional[bool] = None,
) -> Tuple[IpuMemory, ...]:
    """Return the estimate for each IPU of a replica; the micro-batch is `micro_batch_factor` times the compiled one.

    `is_pipeline`: whether the stages run at the same time; None: as the options say.
    """
    if is_pipeline is None:
        strategy = options._execution_strategy
        is_pipeline = isinstance(strategy, PipelinedExecution) and not isinstance(strategy, ShardedExecution)
    scaled = [each.scaled(micro_batch_factor) for each in activations]
    kept = _kept(scaled, options, is_pipeline, is_training=usage.optimizer is not None)
    return tuple(
        IpuMemory(
            ipu,
            _weights(stages, options, usage),
            _gradients(stages, options, usage),
            _optimizer(stages, options, usage),
            sum(kept[stage.index] + scaled[stage.index].casts for stage in stages)
            + max((2 * scaled[stage.index].operands for stage in stages), default=0),
            round(CODE_SHARE * MEMORY_BYTES),
        )
        for ipu, stages in _by_ipu(placement).items()
    )


def check_memory(ipus: Sequence[IpuMemory]) -> None:
    """Warn of IPUs that are nearly full, and of those whose memory does not suffice; an Error in strict mode."""
    text = ", ".join(f"IPU {each.ipu}: {100 * each.share:.0f} %" for each in ipus if each.is_nearly_full)
    if findings.is_active():
        for each in ipus:
            level = findings.TROUBLE if each.share > 1 else findings.WARN if each.is_nearly_full else findings.OK
            findings.add(level, "memory", _described(each))
    elif any(each.share > 1 for each in ipus):
        reject(
            "Out of memory: cannot fit all variable data onto one or more IPUs, according to an estimate for a Mk2 IPU "
            f"({text} of {MEMORY_BYTES / 1e6:.0f} MB). Reduce the micro-batch, use recomputation, or use more IPUs."
        )
    elif text:
        logger.warning("By an estimate for a Mk2 IPU the memory is nearly full: %s", text)


def _described(ipu: IpuMemory) -> str:
    parts = ", ".join(f"{name} {ipu[index] / 1e6:.0f}" for index, name in enumerate(ipu._fields) if index)
    share = f"{100 * ipu.share:.0f} % of {MEMORY_BYTES / 1e6:.0f} MB"
    text = f"IPU {ipu.ipu}: {share} by an estimate for a Mk2 IPU (MB: {parts})"
    remedy = "reduce the micro-batch, use recomputation, or use more IPUs"
    return f"{text}; {remedy}" if ipu.is_nearly_full else text


def _by_ipu(placement: Placement) -> Dict[int, List[StagePlacement]]:
    ipus = range(placement.ipus_per_replica)
    return {ipu: [stage for stage in placement.stages if stage.ipu == ipu] for ipu in ipus}


def _weights(stages: Sequence[StagePlacement], options: Options, usage: Usage) -> int:
    buffers = sum(stage.buffer_bytes for stage in stages)
    total = sum(stage.parameter_bytes for stage in stages)
    return buffers + _stored(total, _elements(stages, usage), _location(options, "weight"), usage.replicas)


def _gradients(stages: Sequence[StagePlacement], options: Options, usage: Usage) -> int:
    if usage.optimizer is None:
        return 0
    elements = _elements(stages, usage, only_trained=True)
    size = _item_size(usage.optimizer.whole["accum_type"])
    if options.Training.gradient_accumulation == 1:
        return size * max(elements, default=0)
    return _stored(size * sum(elements), elements, _location(options, "accumulator"), usage.replicas)


def _optimizer(stages: Sequence[StagePlacement], options: Options, usage: Usage) -> int:
    """Return the bytes of the optimizer's state; the velocity of a combined SGD is the accumulated gradient."""
    if usage.optimizer is None:
        return 0
    elements = _elements(stages, usage, only_trained=True)
    total = sum(_state_sizes(usage.optimizer)) * sum(elements)
    return _stored(total, elements, _location(options, "optimizer"), usage.replicas)


def _state_sizes(values: Hyperparameters) -> List[int]:
    """Return the bytes per element of each tensor of the optimizer's state."""
    has_momentum = any(group.get("momentum", 1) for group in values.groups)
    is_centered = any(group.get("centered") for group in values.groups)
    absent = {"step": True, "momentum_buffer": values.is_combined or not has_momentum, "grad_avg": not is_centered}
    return [
        _item_size(values.whole.get(tensor.dtype_option))
        for name, tensor in values.rule.state.items()
        if not absent.get(name, False)
    ]


def merged(
    placement: Placement, activations: Sequence[StageActivations], stages: Stages
) -> Tuple[Placement, Tuple[StageActivations, ...]]:
    """Return a placement with other stages: the IPU of each, and the consecutive present ones of which it consists."""
    merged_stages = tuple(
        _merged_placement(index, ipu, [placement.stages[each] for each in parts])
        for index, (ipu, parts) in enumerate(stages)
    )
    merged_activations = tuple(_merged_activations([activations[each] for each in parts]) for _, parts in stages)
    return dataclasses.replace(placement, stages=merged_stages), merged_activations


def _merged_placement(index: int, ipu: int, parts: Sequence[StagePlacement]) -> StagePlacement:
    return StagePlacement(
        index=index,
        ipu=ipu,
        phase=0,
        blocks=tuple(block for part in parts for block in part.blocks),
        modules=tuple(module for part in parts for module in part.modules),
        parameters=tuple(name for part in parts for name in part.parameters),
        buffers=tuple(name for part in parts for name in part.buffers),
        parameter_elements=sum(part.parameter_elements for part in parts),
        parameter_bytes=sum(part.parameter_bytes for part in parts),
        buffer_bytes=sum(part.buffer_bytes for part in parts),
        forward_operations=sum(part.forward_operations for part in parts),
    )


def _merged_activations(parts: Sequence[StageActivations]) -> StageActivations:
    """Return the activations of one stage; what enters it is what enters its first part (inferred)."""
    segments = [0]
    for part in parts:
        segments[-1] += part.segments[0]
        segments += part.segments[1:]
    return StageActivations(
        tuple(segments),
        parts[0].entering if parts else 0,
        sum(part.checkpoints for part in parts) + sum(part.passed for part in parts[:-1]),
        sum(part.tensors for part in parts),
        max((part.operands for part in parts), default=0),
        parts[-1].passed if parts else 0,
        sum(part.casts for part in parts),
    )


def _kept(activations: Sequence[StageActivations], options: Options, is_pipeline: bool, is_training: bool) -> List[int]:
    """Return the bytes of activations that each stage keeps."""
    if not is_training:
        return [each.entering for each in activations]
    last = len(activations) - 1
    default = _PIPELINE if is_pipeline and last > 0 else 0
    recomputation = int(options._Popart.options.get("autoRecomputation", default))
    kept = []
    for index, stage in enumerate(activations):
        stashed, once = _stash(stage, recomputation, is_last=index == last)
        # The micro-batches between the forward and the backward of this stage.
        in_flight = 2 * (last - index) + 1 if is_pipeline else 1
        kept.append(stashed * in_flight + once)
    return kept


def _stash(stage: StageActivations, recomputation: int, is_last: bool) -> Tuple[int, int]:
    """Return the bytes kept for each micro-batch in flight, and those needed once while recomputing.

    The last stage of a pipeline does not compute again what follows its last checkpoint, as the backward comes at once:
    this segment is one of those of which the largest is needed. Without a checkpoint nothing is computed again.
    """
    has_checkpoints = len(stage.segments) > 1
    if recomputation == _ALL or (recomputation == _PIPELINE and (has_checkpoints or not is_last)):
        return stage.entering + stage.checkpoints, max(stage.segments)
    if recomputation == _STANDARD:
        return stage.automatic_checkpoints, 0
    if recomputation == _NORM_ONLY:
        return round(_SHARE_WITHOUT_NORMS * stage.saved), 0
    return stage.saved, 0


def _elements(stages: Sequence[StagePlacement], usage: Usage, only_trained: bool = False) -> List[int]:
    names = (name for stage in stages for name in stage.parameters)
    return [usage.parameters[name].numel() for name in names if not only_trained or name in usage.trained]


def _location(options: Options, name: str) -> Mapping[str, Any]:
    locations = options.TensorLocations
    key = f"location_{name}"
    found: Mapping[str, Any] = locations(key) if locations.exists(key) else {}
    return found


def _stored(total: int, elements: Sequence[int], location: Mapping[str, Any], replicas: int) -> int:
    """Return the bytes on the chip of tensors with these numbers of elements, which have `total` bytes together.

    Off-chip tensors are loaded one after the other, of sharded ones the part of the replica; small tensors stay on the
    chip.
    """
    count = sum(elements)
    if not count:
        return total
    item = total / count
    parts: List[float] = list(elements)
    if location.get("useReplicatedTensorSharding"):
        least = int(location.get("minElementsForReplicatedTensorSharding", _RESIDENT_SIZE))
        parts = [each / replicas if each >= least else each for each in elements]
    if not location.get("onChip", 1):
        least = int(location.get("minElementsForOffChip", _RESIDENT_SIZE))
        resident = sum(part for each, part in zip(elements, parts) if each < least)
        return round(item * (resident + max(parts)))
    return round(item * sum(parts))


def _item_size(dtype: Any) -> int:
    return 2 if dtype == torch.half else 4
