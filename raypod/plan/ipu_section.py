"""The section `ipu` of a configuration: the options of the Poplar SDK that PopTorch programs set.

`ipu_options` has the calls of PopTorch that each key makes, and the defaults that depend on other keys.
"""

from __future__ import annotations

from typing import Optional

from pydantic import Field
from typing_extensions import Literal

from raypod.plan.section import Section
from raypod.plan.values import Names, Pairs, Shares, TensorKinds


class IpuSection(Section):
    """Options of the device. None is the default of `ipu_options`, or the SDK's if that has none."""

    ipu_config: Optional[str] = Field(
        None,
        description="file ipu_config.json of optimum-graphcore, whose settings count where neither the command line "
        "nor --config has them: stages, replicas, accumulation, memory",
    )
    stochastic_rounding: Optional[bool] = Field(
        None,
        description="Precision.enableStochasticRounding in training: results in half round up or down at random; else "
        "half weights lose updates that are smaller than their spacing (default: with --precision 16.16)",
    )
    partials: Optional[Literal["half", "float"]] = Field(
        None,
        description="Precision.setPartialsType: partial sums of convolutions and matrix products; half is faster and "
        "smaller, float is for losses that become NaN (default: half with --precision 16.16, else float)",
    )
    automatic_loss_scaling: bool = Field(
        False,
        description="Training.setAutomaticLossScaling: the device doubles or halves the loss scaling after each "
        "update, by the largest gradients in half; for trainings in half without a known loss scaling",
    )
    stable_norm: Optional[bool] = Field(
        None,
        description="enableStableNorm: the slower and more accurate variance of norms; off saves memory (default: that "
        "of the SDK)",
    )
    floating_point_exceptions: bool = Field(
        False,
        description="Precision.enableFloatingPointExceptions: NaN, overflow or division by zero ends the run in the "
        "operator that makes it; to find it, as it is slower",
    )
    available_memory_proportion: Shares = Field(
        None,
        description="setAvailableMemoryProportion: the share of a tile's memory for temporary values of convolutions "
        "and matrix products, for all IPUs or one for each, as in 0.2,0.3; less if it is out of memory, more for speed "
        "(default: that of the SDK, 0.6)",
    )
    recomputation: Optional[Literal["none", "standard", "norms", "pipeline", "all"]] = Field(
        None,
        description="autoRecomputation: activations that the backward pass computes again in place of keeping them, to "
        "save memory; standard: between checkpoints that the compiler chooses, pipeline: all stages but the last, all: "
        "everything but the --recomputation-checkpoints (default: pipeline if a replica is a pipeline, else none)",
    )
    recomputation_checkpoints: Names = Field(
        None,
        description="recomputationCheckpoint: modules whose outputs are kept, as in layer?.*.conv2, so that less is "
        "computed at once; with --recomputation pipeline or all",
    )
    off_chip: TensorKinds = Field(
        None,
        description="TensorLocations, useOnChipStorage(False): what is in Streaming Memory, of optimizer, weights, "
        "activations and accumulators; if a model does not fit, the optimizer's state is the cheapest",
    )
    replicated_tensor_sharding: TensorKinds = Field(
        None,
        description="TensorLocations, useReplicatedTensorSharding: what the replicas of an instance divide among them, "
        "of optimizer, weights and accumulators; saves memory with several replicas per instance",
    )
    off_chip_min_elements: Optional[int] = Field(
        None, ge=0, description="minElementsForOffChip: smaller tensors stay on the chip (default: that of the SDK)"
    )
    sharding_min_elements: Optional[int] = Field(
        None,
        ge=0,
        description="minElementsForReplicatedTensorSharding: smaller tensors are not divided (default: that of the "
        "SDK)",
    )
    io_tiles: Optional[int] = Field(
        None,
        ge=32,
        le=192,
        description="TensorLocations.numIOTiles, an even number: tiles that only transfer, which overlapped input and "
        "output needs",
    )
    overlap_io: Optional[Literal["accumulation-loop", "device-iteration-loop"]] = Field(
        None,
        description="set_overlap_for_input and set_overlap_for_output: the transfers of micro-batches, or of updates, "
        "overlap with the computation; with --io-tiles and --execution sharded, if the host's data is the bottleneck",
    )
    prefetch_depth: Optional[int] = Field(
        None,
        ge=1,
        description="defaultPrefetchBufferingDepth: micro-batches that are sent ahead, as 3 with overlapped input "
        "(default: that of the SDK, 1)",
    )
    merged_all_reduces: Optional[bool] = Field(
        None,
        description="replicatedCollectivesSettings: the gradients of several parameters are reduced together, which is "
        "faster; off if that needs too much memory (default: with more than one replica)",
    )
    accumulator_streams: bool = Field(
        False,
        description="without it, disableGradAccumulationTensorStreams: no code to copy accumulated gradients to the "
        "host; for programs that read them",
    )
    synthetic_data_on_device: bool = Field(
        False,
        description="enableSyntheticData: no data is transferred, and the losses are no results; to measure the device "
        "without the host",
    )
    ipu_profile: Optional[str] = Field(
        None,
        description="autoReport of POPLAR_ENGINE_OPTIONS: each instance writes the reports that PopVision opens into a "
        "subfolder of this one; to find what needs time or memory",
    )
    engine_options: Pairs = Field(
        None,
        description="_Popart.setEngineOptions, KEY=VALUE: any option of Poplar's engine, as in "
        "opt.internalExchangeOptimisationTarget=memory (always: target.deterministicWorkers=portable, so that replicas "
        "stay equal)",
    )
    popart: Pairs = Field(
        None,
        description="_Popart.set, KEY=VALUE: any option of PopART, as in outlineThreshold=10.0; it takes precedence "
        "over the other keys",
    )
    popart_patterns: Pairs = Field(
        None,
        description="_Popart.setPatterns, NAME=true or NAME=false: transformations of PopART, as in TiedGather=true",
    )
