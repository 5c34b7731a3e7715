"""Immutable records: reports of instances, failures (`InstanceLost.kind`) and events of the run.

Their fields are plain Python numbers, strings, tuples and dicts, so that records can be pickled and written as JSON.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Mapping, NamedTuple, Optional, Tuple, Union

from typing_extensions import Literal

# runtime/coordinator/recovery.py: the reaction to each
FailureKind = Literal["died", "raised", "silent", "stuck", "device"]
# "starting" lasts until RunStarted and has no event. "saving" is a wait for a checkpoint that is being written.
Phase = Literal["starting", "training", "evaluating", "saving", "repairing", "ending"]


@dataclasses.dataclass(frozen=True)
class InstanceStarted:
    """An instance is ready: its process runs, its SDK is imported and its programs are built."""

    instance: int
    host: str
    pid: int
    device: str  # "ipu" or "emulated"
    device_line: str  # the SDK and its version, human-readable
    parameters: int
    seconds: Tuple[Tuple[str, float], ...]  # (phase, duration) of the start-up, in order
    data_fingerprint: str = ""  # of the data set that this instance loaded
    versions: Tuple[Tuple[str, str], ...] = ()  # (package, version)
    sources: str = ""  # digest of raypod's files that it runs


@dataclasses.dataclass(frozen=True)
class SaveReport:
    """The result of writing a checkpoint on instance 0."""

    update: int
    path: str
    weights_sha256: str  # empty if it could not be written
    error: Optional[str]
    ema_sha256: Optional[str] = None  # of the averaged weights
    can_pass: bool = False  # the error is one of a disk or network: a later attempt can succeed


class Span(NamedTuple):
    """What a thread did, and when: a bar of a profile (`--profile`)."""

    name: str
    category: str  # "start", "phase", "data wait", "call", "loading", "wait for peers", "reduction" or "save"
    began_s: float  # monotonic clock of the host
    ended_s: float
    thread: str


@dataclasses.dataclass(frozen=True)
class ProcessSpans:
    """What a process of an instance recorded in the window of `--profile` since its previous report."""

    instance: int
    host: str
    pid: int
    spans: Tuple[Span, ...]
    dropped: int = 0  # further spans for which there was no space


class ClockReading(NamedTuple):
    """The clock of an instance's host, compared with the coordinator's."""

    offset_s: float  # monotonic clock there minus the one here
    error_s: float  # the offset is wrong by at most this


@dataclasses.dataclass(frozen=True)
class CallReport:
    """The results of one call of one instance.

    `sums[u][r]` holds numerator and denominator of each metric, over the micro-batches of local replica r in update u
    of the call.
    """

    instance: int
    first_update: int
    sums: Tuple[Tuple[Tuple[float, ...], ...], ...]
    saves: Tuple[SaveReport, ...] = ()  # finished since the previous report
    data_wait_s: float = 0.0  # time that the call waited for data
    call_s: float = 0.0  # duration of the call, including the wait for data
    peer_wait_s: Optional[float] = None  # time that the call waited for other instances; None if the SDK cannot tell
    samples_digest: str = ""  # of the sample indices of the call (runs/ledger.py)
    profile: Optional[ProcessSpans] = None  # in the window of --profile
    warnings: Tuple[str, ...] = ()  # of instance 0: new since the previous report
    norms: Tuple[Dict[str, float], ...] = ()  # of each update (`training/models/norms.py`); equal in all instances


@dataclasses.dataclass(frozen=True)
class EvaluationReport:
    """The results of one instance on its share of the test split.

    `sums` holds numerator and denominator of each metric, each as parts whose sum is exact (`metric.exact_parts`).
    `predictions` has an array [samples, ...] by name, if the task has some; "sample" are the numbers of the samples.
    """

    instance: int
    samples: int
    sums: Tuple[Tuple[float, ...], ...]
    warnings: Tuple[str, ...] = ()  # as of `CallReport`
    predictions: Optional[Mapping[str, Any]] = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True)
class HostUsage:
    """The load of a host: shares of its capacity (0..1), bytes, and counters of bytes since the host was started."""

    cpu_share: Optional[float]  # of all cores, since the previous measurement of this process; None for the first one
    memory_used_bytes: int
    memory_total_bytes: int
    network_received_bytes: int  # by all interfaces but loopback, since boot
    network_sent_bytes: int
    disk_used_bytes: int  # of the file system of the working folder
    disk_total_bytes: int


@dataclasses.dataclass(frozen=True)
class HeartbeatReport:
    """The current activity of an instance, returned by `Heartbeat.beat`."""

    instance: int
    activity: str
    duration_s: float  # of the activity so far
    calls: int  # finished by this process
    slowest_call_s: Optional[float]  # of this process; excludes the first call (compilation) once there are others
    waits_for_others: bool  # inside a collective operation
    cpu_s: float = 0.0  # CPU time of the instance's running threads and their child processes
    host_usage: Optional[HostUsage] = None  # from the first instance of a host
    log_line: Optional[str] = None  # the last line of its log; None if it wrote none, or has no log of its own


@dataclasses.dataclass(frozen=True)
class InstanceLost:
    """An instance failed; also emitted as an event of the run."""

    instance: int
    host: str
    kind: FailureKind
    cause: str
    activity: str  # last reported one; "" if unknown
    stack: str  # stack trace of its working thread; "" if unavailable
    log_file: str
    recovery_action: str = ""  # of kind "device": what the SDK requires; see `errors.DeviceFailed`


@dataclasses.dataclass(frozen=True)
class RunStarted:
    """All instances are ready and have the same weights."""

    device: str
    device_line: str
    first_update: int
    parameters: int
    seconds: Tuple[Tuple[str, float], ...]
    generation: int = 1  # counts fleet starts over all resumes
    instances: Tuple[InstanceStarted, ...] = ()  # in instance order
    resumed_from: Optional[str] = None  # see `record.origin`; "." if the run in the folder goes on


@dataclasses.dataclass(frozen=True)
class PhaseBegun:
    """The run enters a phase. Between phases no time passes that would belong to none."""

    phase: Phase
    update: int  # the number of finished updates


@dataclasses.dataclass(frozen=True)
class CallTimes:
    """How long one call took in one instance."""

    instance: int
    call_s: float  # includes both waits
    data_wait_s: float
    peer_wait_s: Optional[float]  # None if the SDK cannot tell


@dataclasses.dataclass(frozen=True)
class CallDone:
    """All instances finished a call; a line of ledger.jsonl."""

    first_update: int  # 0-based
    digests: Tuple[Tuple[int, str], ...]  # (instance, digest of its samples), of the instances whose report is known
    times: Tuple[CallTimes, ...] = ()  # of the same instances, in instance order
    profiles: Tuple[ProcessSpans, ...] = ()  # in the window of --profile


@dataclasses.dataclass(frozen=True)
class UpdateDone:
    """One weight update of the whole pod; a line of metrics.jsonl."""

    update: int  # 1-based: the number of finished updates
    epoch: int  # 1-based
    metrics: Dict[str, float]  # value by name; the loss comes first
    samples: int  # since the start of the training, over all replicas
    samples_per_s: float  # over the calls of the last second, at least the last call
    time_s: float  # since the run started
    data_wait_share: float = 0.0  # fraction of the call's duration that was spent waiting for data
    missing_reports: Tuple[int, ...] = ()  # of these instances: they were lost; then all metrics are NaN
    part_rates: Dict[str, float] = dataclasses.field(default_factory=dict)  # see `TaskFacts.part_rates`
    learning_rate: Optional[float] = None  # of groups without their own; None in files of earlier versions
    loss_scaling: Optional[float] = None
    norms: Dict[str, float] = dataclasses.field(default_factory=dict)  # of `--log`, by name: `plan.values.NORMS`

    @property
    def has_results(self) -> bool:
        """Whether the metrics are those of the training; a NaN then is one of the training, too."""
        return not self.missing_reports

    @property
    def loss(self) -> float:
        """The loss."""
        return self.metrics["loss"]


@dataclasses.dataclass(frozen=True)
class EpochDone:
    """Metrics over the samples of all updates of an epoch that have results; NaN if none has."""

    epoch: int
    metrics: Dict[str, float]


@dataclasses.dataclass(frozen=True)
class CheckpointBegun:
    """A checkpoint is about to be written; files that belong to it must be flushed now."""

    update: int


@dataclasses.dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint was written and renamed into place."""

    update: int
    path: str
    weights_sha256: str
    ema_sha256: Optional[str] = None  # of the averaged weights


@dataclasses.dataclass(frozen=True)
class CheckpointFailed:
    """A checkpoint could not be written; the checkpoint `previous` still exists, "" for none."""

    update: int
    path: str
    cause: str
    previous: str
    waits_s: float = 0.0  # the training stops for at most this time, until the disk returns; 0 if it goes on


@dataclasses.dataclass(frozen=True)
class InstanceWarned:
    """Python or the SDK has warned of the user's code in an instance, or the training diverges."""

    instance: int
    text: str  # one line, with the place in the code if it is known
    log_file: str  # of the instance; "" if the warning is one of the whole run


@dataclasses.dataclass(frozen=True)
class EvaluationDone:
    """The test split was evaluated."""

    samples: int
    metrics: Dict[str, float]
    update: int  # the number of finished updates
    epoch: int  # 1-based
    # Of `Task.prediction_details`. Not compared, because it can have NaN and arrays.
    details: Optional[Mapping[str, Any]] = dataclasses.field(default=None, repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class Repaired:
    """Lost instances were replaced; the run continues after update `update`."""

    lost: Tuple[int, ...]
    hosts: Tuple[str, ...]  # the new host of each lost instance
    seeded_from: str  # "instance 1", "the snapshot of host a", or the path of a checkpoint
    update: int
    seconds: float
    restarts: int  # number of repairs since the coordinator was started
    generation: int  # of the fleet after the repair
    passed_over: Tuple[str, ...] = ()  # damaged checkpoints newer than the one used: messages
    instances: Tuple[InstanceStarted, ...] = ()  # all of the repaired fleet, in instance order
    reset_on: Tuple[str, ...] = ()  # hosts on which the reset command was executed


@dataclasses.dataclass(frozen=True)
class Resized:
    """The run continues with other replicas: the samples of every update stay, the bits of the weights do not."""

    update: int
    replicas: int
    gradient_accumulation: int
    replicas_before: int  # with the gradient accumulation that gave the same global batch
    hosts: Tuple[str, ...]  # of each instance, in instance order
    cause: str


@dataclasses.dataclass(frozen=True)
class StoppedEarly:
    """The run ends after `update` updates: `patience` evaluations in a row did not improve a metric."""

    update: int
    metric: str
    patience: int
    best_update: int
    best: float

    @property
    def reason(self) -> str:
        """Why the run ends, for people."""
        times = "1 evaluation" if self.patience == 1 else f"{self.patience} evaluations"
        best = f"the best is {self.best:.5g}, after update {self.best_update}"
        return f"{self.metric} has not improved for {times}; {best}"


@dataclasses.dataclass(frozen=True)
class RunEnded:
    """The last event of a run that finished or was interrupted."""

    updates: int
    interrupted: bool
    weights_sha256: str
    checkpoint: Optional[str]
    cause: str = ""  # of an interruption without a signal
    ema_sha256: Optional[str] = None  # of the averaged weights
    preempted: bool = False  # the interruption is a preemption
    resizes: Tuple[Dict[str, int], ...] = ()  # changes of the number of replicas: see `checkpoint.Manifest`


# From the first of these on, a run trains: its folder is kept, and mirrored.
TRAINS = (UpdateDone, RunEnded)

Event = Union[
    RunStarted,
    PhaseBegun,
    CallDone,
    UpdateDone,
    EpochDone,
    CheckpointBegun,
    CheckpointSaved,
    CheckpointFailed,
    EvaluationDone,
    InstanceLost,
    InstanceWarned,
    Repaired,
    Resized,
    StoppedEarly,
    RunEnded,
]
