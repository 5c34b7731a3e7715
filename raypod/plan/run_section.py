"""The section `run` of a configuration: its keys with defaults and help. `flag_help.py` has their help groups."""

from __future__ import annotations

from typing import Optional

import pydantic
from pydantic import Field
from typing_extensions import Literal

from raypod.plan.section import MAX_TIMEOUT_S, Section
from raypod.plan.values import Logged, ResumePath, StorageUrl, Trackers, Updates, parse_interval, parse_unsaved

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
    checkpoint_every: str = Field("1 epoch", description="interval, as in 100 updates, 2 epochs, 10 minutes")
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
    max_unsaved: str = Field(
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

    @pydantic.field_validator("checkpoint_every")
    @classmethod
    def _is_an_interval(cls, value: str) -> str:
        parse_interval(value)
        return value

    @pydantic.field_validator("max_unsaved")
    @classmethod
    def _is_a_limit(cls, value: str) -> str:
        parse_unsaved(value)
        return value
