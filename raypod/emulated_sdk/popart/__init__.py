"""`popart`, emulated: the enums whose integers PopTorch programs pass to `options._Popart.set`, and nothing else.

Names and values are those of the PopART repository (willow/include/popart/*.hpp, python/popart/popart_core/popart.cpp;
commit d2f20d78d). The emulated SDK does not run PopART programs.
"""

from __future__ import annotations

from enum import IntEnum

# Input data: from the host, or generated on the device.
SyntheticDataMode = IntEnum("SyntheticDataMode", "Off Zeros RandomNormal RandomUniform", start=0)
# Automatic recomputation of activations (`autoRecomputation`).
RecomputationType = IntEnum("RecomputationType", "NoRecompute Standard NormOnly Pipeline RecomputeAll", start=0)
# Schedule of the operations after gradient accumulation.
AccumulateOuterFragmentSchedule = IntEnum(
    "AccumulateOuterFragmentSchedule", "Scheduler Serial OverlapCycleOptimized OverlapMemoryOptimized", start=0
)
# Copying of a subgraph's inputs and outputs.
SubgraphCopyingStrategy = IntEnum("SubgraphCopyingStrategy", "OnEnterAndExit JustInTime", start=0)
# Assignment of operations to IPUs.
VirtualGraphMode = IntEnum("VirtualGraphMode", "Off Manual Auto ExecutionPhases", start=0)
# Merging of weight updates.
MergeVarUpdateType = IntEnum("MergeVarUpdateType", "Off All AutoLoose AutoTight", start=0)
# Reduction of losses and gradients.
ReductionType = IntEnum("ReductionType", "Sum Mean NoReduction", start=0)
# When a mean over gradients divides.
MeanReductionStrategy = IntEnum("MeanReductionStrategy", "Running Post", start=0)
# When an execution phase loads its inputs.
ExecutionPhaseIOSchedule = IntEnum("ExecutionPhaseIOSchedule", "Preload OnDemand", start=0)
# Order of the operations of an execution phase.
ExecutionPhaseSchedule = IntEnum("ExecutionPhaseSchedule", "Interleaving Batch BatchClusteredIO", start=0)
# Schedule of serialized batches.
BatchSerializationBatchSchedule = IntEnum(
    "BatchSerializationBatchSchedule", "Scheduler Isomorphic OverlapOnIo OverlapOnCompute", start=0
)
# When batch serialization is applied.
BatchSerializationTransformContext = IntEnum(
    "BatchSerializationTransformContext", {"Fwd": 0, "Bwd": 1, "Forward": 0, "Backward": 1}
)
# Implementation of batch serialization.
BatchSerializationMethod = IntEnum("BatchSerializationMethod", "UnrollDynamic UnrollStatic Loop", start=0)
# How the backward graph gets the forward graph's tensors.
AutodiffStitchStrategy = IntEnum(
    "AutodiffStitchStrategy", "RecomputeMinimal RecomputeAllNonInputs AddFwdOutputs SafeAddFwdOutputs", start=0
)
# The gradients used for automatic loss scaling.
GradientTensorTrackingMethod = IntEnum(
    "GradientTensorTrackingMethod",
    "AllNonViewChangingGradientTensors ConvAndMatmulGradients GradientsOfUserSpecifiedTensors",
    start=0,
)
# The loop whose cycles are counted.
Instrumentation = IntEnum("Instrumentation", "Outer Inner", start=0)
# Memory of a tensor.
TensorStorage = IntEnum("TensorStorage", "OnChip OffChip", start=0)
# The tiles that hold a tensor.
TileSet = IntEnum("TileSet", "Compute IO", start=0)
# Whether a tensor is sharded over replicas.
ReplicatedTensorSharding = IntEnum("ReplicatedTensorSharding", "Off On", start=0)
# Synchronization of the IPUs.
SyncPattern = IntEnum("SyncPattern", "Full SinglePipeline ReplicaAndLadder", start=0)
# When the program attaches to its device.
DeviceConnectionType = IntEnum("DeviceConnectionType", "Always OnDemand Never", start=0)
