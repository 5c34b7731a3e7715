"""The frozen records that go up: from an instance to the coordinator, and from the coordinator to whoever listens.

Calls go down, records go up. Nobody below the command line knows the bar or the files that these records end in.
All of them hold plain Python numbers and strings, so that they cross processes and land in JSON as they are.
"""

from __future__ import annotations

import dataclasses
from typing import Optional, Tuple, Union

from typing_extensions import Literal

# ---- from an instance to the coordinator ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class InstanceStarted:
    """An instance has its process, its environment and its SDK, and has built what it will run."""

    instance: int
    host: str
    pid: int
    device: str  # "ipu" or "emulated"
    device_line: str  # which SDK was found, in one line for people
    parameters: int
    seconds: Tuple[Tuple[str, float], ...]  # where the start-up time went, in order
    data_fingerprint: str = ""  # of the data set as this instance loaded it
    versions: Tuple[Tuple[str, str], ...] = ()  # of what it computes with


@dataclasses.dataclass(frozen=True)
class SaveReport:
    """What became of a checkpoint that instance 0 was told to write."""

    update: int
    path: str
    weights_sha256: str  # empty where it could not be written
    error: Optional[str]


@dataclasses.dataclass(frozen=True)
class CallReport:
    """One call of one instance: for each of its updates, one value per local replica.

    `losses[u][r]` is the mean loss over the micro-batches that replica r saw in update u; `correct[u][r]` counts its
    right predictions.
    """

    instance: int
    first_update: int
    losses: Tuple[Tuple[float, ...], ...]
    correct: Tuple[Tuple[int, ...], ...]
    saves: Tuple[SaveReport, ...] = ()  # that ended since the last report
    data_wait_s: float = 0.0  # how long the call waited for its data
    call_s: float = 0.0  # from asking for the data to the results
    samples_digest: str = ""  # of the indices that were gathered for it (ledger.py)


@dataclasses.dataclass(frozen=True)
class EvaluationReport:
    """What one instance saw of the test split."""

    instance: int
    samples: int
    correct: int
    loss_sum: float


@dataclasses.dataclass(frozen=True)
class HeartbeatReport:
    """What an instance is doing, told by a thread that does nothing else."""

    instance: int
    doing: str
    for_s: float
    calls: int  # done by this process
    slowest_call_s: Optional[float]  # of this process; the first counts only while it is alone
    waits_for_others: bool  # inside an exchange


@dataclasses.dataclass(frozen=True)
class InstanceLost:
    """An instance is given up. Also an event of the run: it goes on without that process."""

    instance: int
    host: str
    kind: Literal["died", "raised", "silent", "stuck"]
    cause: str
    doing: str  # when it was last heard, "" if that is not known
    stack: str  # of its working thread, "" where none could be had
    log_file: str


# ---- from the coordinator upwards -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RunStarted:
    """All instances are up and start from the same weights."""

    device: str
    device_line: str
    first_update: int
    parameters: int
    seconds: Tuple[Tuple[str, float], ...]
    generation: int = 1  # lives of the fleet, over all resumes


@dataclasses.dataclass(frozen=True)
class CallDone:
    """All instances have done a call; a line of ledger.jsonl."""

    first_update: int  # 0-based
    digests: Tuple[Tuple[int, str], ...]  # (instance, digest of the samples it gathered) of those that reported


@dataclasses.dataclass(frozen=True)
class UpdateDone:
    """One weight update of the whole pod; a line of metrics.jsonl. `accuracy` is in percent."""

    update: int  # 1-based: the number of updates done
    epoch: int  # 1-based
    loss: float
    accuracy: float
    samples: int  # seen since the start of the training, all replicas
    samples_per_s: float
    time_s: float  # since the run started
    data_wait_share: float = 0.0  # of the time of this update's call, the part that it waited for its data


@dataclasses.dataclass(frozen=True)
class EpochDone:
    """Mean loss and accuracy (percent) over the updates of an epoch that this run did."""

    epoch: int
    loss: float
    accuracy: float


@dataclasses.dataclass(frozen=True)
class CheckpointBegun:
    """A checkpoint is about to be taken: what goes with it belongs on the disk now."""

    update: int


@dataclasses.dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint was written and renamed into place."""

    update: int
    path: str
    weights_sha256: str


@dataclasses.dataclass(frozen=True)
class CheckpointFailed:
    """A checkpoint could not be written; the run goes on, and `previous` is still there."""

    update: int
    path: str
    cause: str
    previous: str


@dataclasses.dataclass(frozen=True)
class EvaluationDone:
    """The test split was evaluated; `accuracy` is in percent."""

    samples: int
    loss: float
    accuracy: float
    update: int  # the number of updates done
    epoch: int  # 1-based


@dataclasses.dataclass(frozen=True)
class Repaired:
    """Lost instances were replaced, and the run goes on after update `update`."""

    lost: Tuple[int, ...]
    hosts: Tuple[str, ...]  # where each of them lives now
    seeded_from: str  # "instance 1", or a checkpoint's path
    update: int
    seconds: float
    restarts: int  # of the run so far
    generation: int  # of the fleet, from here on
    passed_over: Tuple[str, ...] = ()  # newer checkpoints than the one it was seeded from, that are damaged: in words


@dataclasses.dataclass(frozen=True)
class RunEnded:
    """The last event of a run, interrupted or not."""

    updates: int
    interrupted: bool
    weights_sha256: str
    checkpoint: Optional[str]
    cause: str = ""  # of an interruption that nobody signalled


Event = Union[
    RunStarted,
    CallDone,
    UpdateDone,
    EpochDone,
    CheckpointBegun,
    CheckpointSaved,
    CheckpointFailed,
    EvaluationDone,
    InstanceLost,
    Repaired,
    RunEnded,
]
