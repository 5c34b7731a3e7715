"""`options._Popart`: options of the graph compiler by PopART's names, and the check of all names at compilation."""

from __future__ import annotations

import copy
import numbers
from typing import Any, Dict, FrozenSet, Mapping

from poptorch.custom_operators import registry
from poptorch.errors import Error

# The options of PopTorch and PopART by the kind of their values, as PopTorch's compiler registers them.
_NAMES = {
    "bool": """
        aliasZeroCopy auto_round_num_ipus automaticLossScalingSettings.enabled
        batchSerializationSettings.concatOnExecutionPhaseChange batchSerializationSettings.concatOnPipelineStageChange
        batchSerializationSettings.concatOnVirtualGraphChange broadcast_buffers compileEngine constantWeights
        decomposeGradSum delayVarUpdates disableGradAccumulationTensorStreams disableOptimizerStateTensorStreams
        dotOpNames enableDistributedReplicatedGraphs enableEngineCaching enableExplicitIR enableExplicitMainLoops
        enableFloatingPointChecks enableFullyConnectedPass enableGradientAccumulation enableInplaceAmbiguityChecking
        enableLoadAndOffloadRNGState enableMergeExchange enableNonStableSoftmax enableOutlining
        enableOutliningCopyCostPruning enablePipelining enablePrefetchDatastreams enableReplicatedGraphs
        enableSerializedMatmuls enableStableNorm enableStochasticRounding enableSupportedDataTypeCasting
        ensureFp32LossScaleTensor explicitRecomputation exportPoplarComputationGraph exportPoplarVertexGraph
        groupHostSync groupNormStridedChannelGrouping instrumentWithHardwareCycleCounter opxAliasChecking
        opxModifyChecking rearrangeAnchorsOnHost rearrangeStreamsOnHost
        replicatedCollectivesSettings.mergeAllReduceCollectives
        replicatedCollectivesSettings.prepareScheduleForMergingCollectives
        scheduleNonWeightUpdateGradientConsumersEarly separateCallOpPdfs separate_backward_phase
        serial_phases_execution strictOpVersions useHostCopyOps use_model
    """,
    "uint64": """
        accumulateOuterFragmentSettings.schedule accumulationAndReplicationReductionType accumulationFactor
        accumulation_and_replication_reduction_type autoRecomputation autodiffSettings.stitchStrategy
        automaticLossScalingSettings.gradientTensorTrackingMethod automaticLossScalingSettings.updatePeriod
        batchSerializationSettings.batchSchedule batchSerializationSettings.factor batchSerializationSettings.method
        batchSerializationSettings.transformContext compilationProgressTotal connection_type defaultBufferingDepth
        defaultPrefetchBufferingDepth device_iterations distributed_process_id executionPhaseSettings.phases
        executionPhaseSettings.stages execution_mode finalDotOp firstDotOp globalReplicaOffset globalReplicationFactor
        gradient_accumulation input_cgt input_group_size ipu_id ipu_version looseThresholdAtPeak max_repeat_logs
        meanAccumulationAndReplicationReductionStrategy mergeVarUpdate mergeVarUpdateMemThreshold numIOTiles
        num_distributed_processes output_mode output_return_period random_seed replication_factor
        subgraphCopyingStrategy swapLimitScheduler sync_pattern syntheticDataMode tensors_liveness
        transitiveClosureOptimizationThreshold virtualGraphMode
    """,
    "floating point": """
        automaticLossScalingSettings.binEdgeLocation automaticLossScalingSettings.thresholdUpperCountProportion
        outlineSequenceBreakCost outlineThreshold timeLimitScheduler
    """,
    "string": """
        cachePath customCodeletCompileFlags kahnTieBreaker logDir log_dir model_name partialsTypeMatMuls
        saveInitializersToFile serializedPoprithmsShiftGraphsDir
    """,
    "container": """
        accumulateOuterFragmentSettings.excludedVirtualGraphs convolutionOptions customCodelets dotChecks
        engineOptions gclOptions hardwareInstrumentations lstmOptions matmulOptions reportOptions
        updatableNamedBuffers
    """,
    # PopART's graph transformations.
    "pattern": """
        AdamDecompose AdaptiveDecompose AllReduceToIdentity Atan2Arg0GradOp Atan2Arg1GradOp
        ContiguateIpuCopyIndicesPattern ConvDataGrad ConvFlipWeightsDoubleFlip ConvFlipWeightsGradOp ConvTranspose
        CosGradOp CoshOp DecomposeBinaryConstScalar DivArg0GradOp DivArg1GradOp ExpGradOp ExpandCast Expm1GradOp
        FmodArg0GradOp InPlace InitAccumulate LSTMOp LambSerialisedWeight Log1pGradOp LogGradOp LoopScanOut
        MatMulLhsGradOp MatMulOp MatMulRhsGradOp MulArgGradOp NegativeOneScale NlllWithSoftmaxGradDirect OpToIdentity
        PackedDataBlock PadSum PostNRepl PowArg0GradOp PowArg1GradOp PreUniRepl ReciprocalGradOp
        RemoveUnnecessaryLossGradCast SGD0Decompose SGD1Decompose SGD2Decompose ScanToLoop Slice2SliceSubsample
        SoftmaxGradDirect SplitGather SplitGradOpToConcat SplitOp SqrtGradOp SubtractArg1GradOp SumToAdd TiedGather
        TiedGatherAccumulate TransposeToIdentityOrReshapePattern UpdateInplacePrioritiesForIpu UpsampleToResize
        ViewSimplifyPattern
    """,
}
_KNOWN: Dict[str, FrozenSet[str]] = {kind: frozenset(names.split()) for kind, names in _NAMES.items()}
# Handled by name, not by kind.
_OWN = frozenset(("patterns", "patterns_level", "anchored_tensors", "available_memory_proportion", "ipuof_configs"))


class _PopartOptions:
    """Options of the graph compiler.

    A setter accepts any name and value; compilation raises Error for those that PopART does not have.
    """

    def __init__(self) -> None:
        self._is_frozen = False
        self.options: Dict[str, Any] = {
            "instrumentWithHardwareCycleCounter": False,
            "rearrangeAnchorsOnHost": False,
        }

    def set(self, key: str, value: Any) -> _PopartOptions:
        """Set one option."""
        self.checkIsFrozen()
        self.options[key] = value
        return self

    def setEngineOptions(self, engine_options: Dict[str, str]) -> _PopartOptions:
        """Set options of the engine by name."""
        return self.set("engineOptions", engine_options)

    def setPatterns(self, patterns: Dict[str, bool], level: int = 2) -> _PopartOptions:
        """Enable or disable graph transformations by name; AssertionError for other types."""
        assert isinstance(level, int), f"The level of the patterns must be an integer, got {level!r}"
        assert isinstance(patterns, dict), f"Patterns must be a dictionary of names and bools, got {patterns!r}"
        return self.set("patterns_level", level).set("patterns", patterns)

    def checkIsFrozen(self, option: str | None = None) -> None:
        """Raise AttributeError if the options are frozen."""
        if self._is_frozen:
            raise AttributeError("Can't modify frozen Options")

    def __deepcopy__(self, memo: Dict[int, Any]) -> _PopartOptions:
        copied = _PopartOptions()
        copied.options = copy.deepcopy(self.options, memo)
        return copied

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"


def validate(values: Mapping[str, Any]) -> None:
    """Check options by name, as compilation does: those of `Options.toDict()`, or those of `_Popart` only.

    Raises:
        Error: an unknown name, or a value of another type.
    """
    for name, value in values.items():
        kind = _kind(name, value)
        if not (name in _OWN or name.startswith("location_") or name in _KNOWN[kind]):
            raise Error(f"Unknown {kind} option {name}")
    patterns = values.get("patterns", {})
    if patterns and "patterns_level" not in values:
        raise Error("The PopART option 'patterns' needs 'patterns_level': call _Popart.setPatterns(patterns, level)")
    unknown = [name for name in patterns if name not in _KNOWN["pattern"] and not registry.is_pattern(name)]
    if unknown:
        raise Error(f"Unknown pattern {unknown[0]!r}")


def _kind(name: str, value: Any) -> str:
    """Return the kind of a value; Error for a value that is of none."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, numbers.Integral):
        return "uint64"
    if isinstance(value, numbers.Real):
        return "floating point"
    if isinstance(value, str):
        return "string"
    if isinstance(value, (dict, list, tuple, set)):
        return "container"
    raise Error(f"Unknown value type {type(value).__name__} for option {name}")
