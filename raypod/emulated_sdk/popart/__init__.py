"""`popart`, emulated: the enums whose integers PopTorch programs pass to `options._Popart.set`, and nothing else.

Names and values are those of the PopART repository (willow/include/popart/*.hpp, python/popart/popart_core/popart.cpp;
commit d2f20d78d). The emulated SDK does not run PopART programs.
"""

from __future__ import annotations

from enum import IntEnum


class SyntheticDataMode(IntEnum):
    """Input data: from the host, or generated on the device."""

    Off = 0
    Zeros = 1
    RandomNormal = 2
    RandomUniform = 3


class RecomputationType(IntEnum):
    """Automatic recomputation of activations (`autoRecomputation`)."""

    NoRecompute = 0
    Standard = 1
    NormOnly = 2
    Pipeline = 3
    RecomputeAll = 4


class AccumulateOuterFragmentSchedule(IntEnum):
    """Schedule of the operations after gradient accumulation."""

    Scheduler = 0
    Serial = 1
    OverlapCycleOptimized = 2
    OverlapMemoryOptimized = 3


class SubgraphCopyingStrategy(IntEnum):
    """Copying of a subgraph's inputs and outputs."""

    OnEnterAndExit = 0
    JustInTime = 1


class VirtualGraphMode(IntEnum):
    """Assignment of operations to IPUs."""

    Off = 0
    Manual = 1
    Auto = 2
    ExecutionPhases = 3


class MergeVarUpdateType(IntEnum):
    """Merging of weight updates."""

    Off = 0
    All = 1
    AutoLoose = 2
    AutoTight = 3


class ReductionType(IntEnum):
    """Reduction of losses and gradients."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(IntEnum):
    """When a mean over gradients divides."""

    Running = 0
    Post = 1


class ExecutionPhaseIOSchedule(IntEnum):
    """When an execution phase loads its inputs."""

    Preload = 0
    OnDemand = 1


class ExecutionPhaseSchedule(IntEnum):
    """Order of the operations of an execution phase."""

    Interleaving = 0
    Batch = 1
    BatchClusteredIO = 2


class BatchSerializationBatchSchedule(IntEnum):
    """Schedule of serialized batches."""

    Scheduler = 0
    Isomorphic = 1
    OverlapOnIo = 2
    OverlapOnCompute = 3


class BatchSerializationTransformContext(IntEnum):
    """When batch serialization is applied."""

    Fwd = 0
    Bwd = 1
    Forward = 0
    Backward = 1


class BatchSerializationMethod(IntEnum):
    """Implementation of batch serialization."""

    UnrollDynamic = 0
    UnrollStatic = 1
    Loop = 2


class AutodiffStitchStrategy(IntEnum):
    """How the backward graph gets the forward graph's tensors."""

    RecomputeMinimal = 0
    RecomputeAllNonInputs = 1
    AddFwdOutputs = 2
    SafeAddFwdOutputs = 3


class GradientTensorTrackingMethod(IntEnum):
    """The gradients used for automatic loss scaling."""

    AllNonViewChangingGradientTensors = 0
    ConvAndMatmulGradients = 1
    GradientsOfUserSpecifiedTensors = 2


class Instrumentation(IntEnum):
    """The loop whose cycles are counted."""

    Outer = 0
    Inner = 1


class TensorStorage(IntEnum):
    """Memory of a tensor."""

    OnChip = 0
    OffChip = 1


class TileSet(IntEnum):
    """The tiles that hold a tensor."""

    Compute = 0
    IO = 1


class ReplicatedTensorSharding(IntEnum):
    """Whether a tensor is sharded over replicas."""

    Off = 0
    On = 1


class SyncPattern(IntEnum):
    """Synchronization of the IPUs."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class DeviceConnectionType(IntEnum):
    """When the program attaches to its device."""

    Always = 0
    OnDemand = 1
    Never = 2
