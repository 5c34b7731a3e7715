"""The sections `run`, `ipu` and `pod` of a configuration: their keys with defaults and help.

`flags.py` has their help groups. The section `ipu` holds the options of the Poplar SDK that PopTorch programs set:
`ipu_options.py` has the calls of PopTorch that each key makes, and the defaults that depend on other keys.
"""

from __future__ import annotations

from typing import Any, Optional

import pydantic
from pydantic import Field
from typing_extensions import Literal

from raypod.plan.values import (
    Logged,
    Names,
    Pairs,
    Period,
    ResumePath,
    Shares,
    StorageUrl,
    TensorKinds,
    Trackers,
    Unsaved,
    Updates,
)

MAX_TIMEOUT_S = 1e6  # larger values overflow the timers of the operating system


class Section(pydantic.BaseModel):
    """Base class of the sections: immutable; unknown keys are errors."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _check_kind(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Reject empty strings, and booleans for numbers, which pydantic would convert to 0 and 1."""
        if isinstance(value, str) and not value.strip():
            raise ValueError("must not be empty; omit it for the default")
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation not in (bool, Optional[bool]):
            raise ValueError("must not be a boolean")
        return value


# Default of `run.stuck_after_s` by device. Graphcore's training script for a POD64 waits 900 s for the host.
CALL_TIMEOUTS_S = {"emulated": 30.0, "ipu": 900.0}

MAX_REPORT_SAMPLES = 100  # of at most 12 kB each: a report has less than 5 MB
SNAPSHOTS_KEPT = 2  # in the memory of each host: one is complete while the other one is written


class RunSection(Section):
    """How the run is executed, and where its files are."""

    device: Literal["auto", "ipu", "emulated"] = Field(
        "auto", description="SDK to run on; auto: ipu if it is installed"
    )
    fleet: Literal["auto", "ray", "inline"] = Field(
        "auto",
        description="inline: one instance in this process, without Ray; auto: inline for one instance on this host, "
        "unless IPUs, a setting, or a running cluster need Ray",
    )
    collectives: Literal["auto", "horovod", "gloo"] = Field(
        "auto", description="backend between instances; auto: Horovod if it is installed"
    )
    strict: Optional[bool] = Field(
        None,
        description="emulated SDK: what an IPU rejects, or has no memory for, is an error instead of a warning "
        "(default: the variable EMULATED_POD_STRICT)",
    )
    run_dir: Optional[str] = Field(None, description="run folder (default runs/<time>-<name>)")
    resume: ResumePath = Field(None, description="run folder, checkpoint, or URL of one of them to resume from")
    resume_anyway: Optional[str] = Field(
        None, description="comma-separated settings that may differ from those of the checkpoint"
    )
    checkpoint_every: Period = Field("1 epoch", description="interval, as in 100 updates, 2 epochs, 10 minutes")
    keep_checkpoints: int = Field(3, ge=1, description="newest checkpoints to keep, besides the best by --best-metric")
    snapshot_every: int = Field(
        0,
        ge=0,
        description="updates between two copies of the state in the memory of each host, to which a repair goes back "
        "that has lost the state of all devices; 0: none, it goes back to a checkpoint",
    )
    checkpoint_copies: int = Field(
        1, ge=1, description="hosts that keep the newest checkpoint, that of the coordinator among them"
    )
    storage_path: StorageUrl = Field(
        None, description="URL under which the run is mirrored, as in s3://bucket/prefix, sftp://host/path, file:///mnt"
    )
    storage_timeout_s: float = Field(
        120, gt=0, le=MAX_TIMEOUT_S, description="time at the end of the run to mirror the rest"
    )
    keep_remote: Optional[int] = Field(
        None, ge=1, description="newest checkpoints to keep on the remote storage (default: --keep-checkpoints)"
    )
    best_metric: Optional[str] = Field(
        None, description="test metric of the best checkpoint, as in loss (default: the task's, accuracy of images)"
    )
    on_nonfinite: Literal["stop", "continue"] = Field("stop", description="reaction to a loss that is NaN or infinite")
    status_port: int = Field(
        0, ge=0, le=65_535, description="port of the status endpoint on loopback; 0: the system chooses one"
    )
    profile: Updates = Field(
        None, description="write profile.json, a trace of all instances for ui.perfetto.dev, as in updates 20-25"
    )
    trackers: Trackers = Field(
        None, description="record the run also with tensorboard, mlflow, wandb, or module:Class, as in mlflow,wandb"
    )
    tracker_artifacts: Literal["none", "report", "checkpoint", "all"] = Field(
        "report", description="files that trackers get at the end: report.html and the config, the newest checkpoint"
    )
    tracker_timeout_s: float = Field(
        30, gt=0, le=MAX_TIMEOUT_S, description="time that trackers have at the end of the run to record the rest"
    )
    log: Logged = Field(
        None,
        description="also measure in every update: grad-norm (emulated SDK only), weight-norm, update-ratio, as in "
        "grad-norm,weight-norm; the last two read the weights back after every call",
    )
    report_samples: int = Field(
        0,
        ge=0,
        le=MAX_REPORT_SAMPLES,
        description="image classification: test images that the report shows of the errors with the highest confidence",
    )
    tensorboard: bool = Field(False, description="also write TensorBoard event files into the run folder")
    save_timeout_s: float = Field(600, gt=0, le=MAX_TIMEOUT_S, description="timeout for writing a checkpoint")
    max_unsaved: Unsaved = Field(
        "60 minutes",
        description="checkpoints in a row, or time, that cannot be written before the training stops and waits for "
        "the disk, as in 3 checkpoints, 60 minutes",
    )
    save_retry_s: float = Field(
        1800,
        ge=0,
        le=MAX_TIMEOUT_S,
        description="time to wait for a disk on which no checkpoint can be written, before the run ends",
    )
    start_timeout_s: float = Field(
        120, gt=0, le=MAX_TIMEOUT_S, description="timeout for each step of starting the instances"
    )
    report_timeout_s: float = Field(
        1800,
        gt=0,
        le=MAX_TIMEOUT_S,
        description="timeout for the next report of an instance, including compilation and loading",
    )
    stop_timeout_s: float = Field(10, gt=0, le=MAX_TIMEOUT_S, description="grace period for an instance to exit")
    max_restarts: int = Field(
        3, ge=0, description="repairs before the run fails; an hour without a failure resets the count"
    )
    standby: int = Field(
        0,
        ge=0,
        le=64,
        description="processes per host that wait, with SDK and data loaded, to replace lost instances at once",
    )
    reset_command: Optional[str] = Field(
        None,
        description="shell command that resets devices when the SDK requires it, as in vipu reset partition NAME",
    )
    reset_timeout_s: float = Field(300, gt=0, le=MAX_TIMEOUT_S, description="time limit of --reset-command")
    dead_after_s: float = Field(
        1,
        gt=0,
        le=MAX_TIMEOUT_S,
        description="seconds to wait, after an error of an instance, for Ray to report a dead process as its cause",
    )
    silent_after_s: float = Field(
        15, gt=0, le=MAX_TIMEOUT_S, description="timeout for detecting a frozen process or an unreachable host"
    )
    stuck_after_s: Optional[float] = Field(
        None,
        gt=0,
        le=MAX_TIMEOUT_S,
        description="timeout of a call (default: 30, on IPUs 900) or 3 x the slowest call; 10 x while it uses CPU time",
    )
    read_retry_s: float = Field(
        60,
        ge=0,
        le=MAX_TIMEOUT_S,
        description="time to read samples again after an error of a disk or network, before the run ends",
    )
    preemption_grace_s: Optional[float] = Field(
        None,
        gt=0,
        le=MAX_TIMEOUT_S,
        description="time from SIGTERM or SIGUSR1 to the end of the run (default: no limit)",
    )
    preemption_exit_code: Optional[int] = Field(
        None, ge=1, le=255, description="exit code of a run that a preemption ends (default: 130)"
    )

    def on_device(self, device: str) -> RunSection:
        """Return these settings with the defaults of a device, "ipu" or "emulated"."""
        return self if self.stuck_after_s else self.model_copy(update={"stuck_after_s": CALL_TIMEOUTS_S[device]})

    def has_snapshot_after(self, update: int) -> bool:
        """Return whether a snapshot is taken after `update` updates, which are whole calls."""
        return self.snapshot_every > 0 and update % self.snapshot_every == 0

    @property
    def call_timeout_s(self) -> float:
        """The timeout of a call; that of the emulated SDK until the device is known."""
        return self.stuck_after_s or CALL_TIMEOUTS_S["emulated"]

    @property
    def writes_tensorboard(self) -> bool:
        """Whether the run writes TensorBoard event files."""
        return self.tensorboard or "tensorboard" in (self.trackers or ())


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


class PodSection(Section):
    """The placement. With equal replicas it does not change the results."""

    replicas: int = Field(4, ge=1, description="total number of model replicas over all instances")
    num_instances: int = Field(2, ge=1, description="host processes, which have equal numbers of replicas")
    ipus_per_replica: int = Field(1, ge=1, description="IPUs per replica")
    num_ipus: Optional[int] = Field(None, ge=1, description="total number of IPUs, in place of --replicas")
    threads_per_replica: int = Field(
        1, ge=0, le=4096, description="intra-op threads per replica; 0: the cores of the host divided by its replicas"
    )
    bind_cores: Optional[bool] = Field(
        None, description="bind each instance to its own cores, by NUMA node (default: `numa` of the cluster file)"
    )
    cluster: Optional[str] = Field(None, description="cluster YAML file of `raypod up` (default: this host)")
    wait_hosts: float = Field(
        0, ge=0, le=MAX_TIMEOUT_S, description="seconds to wait for hosts that have not joined the cluster yet"
    )
    elastic: bool = Field(False, description="continue with fewer replicas while hosts are lost, with equal updates")
    min_hosts: Optional[int] = Field(
        None, ge=1, description="elastic: the fewest hosts that continue, else the run ends"
    )
    executable_cache_path: Optional[str] = Field(
        None, description="cache folder of compiled executables (default on IPUs: one per user and host)"
    )

    @property
    def is_elastic(self) -> bool:
        """Whether the number of replicas may change; `min_hosts` implies it."""
        return self.elastic or self.min_hosts is not None
