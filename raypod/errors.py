"""The error tree. A user's mistake has its own branch, so that it ends in one line and exit code 2, never a traceback.

    RaypodError
    |-- UserError               exit code 2: something to correct in what was asked for
    |   |-- ConfigError         a key, a value, or two values that contradict each other
    |   |   `-- DataMissing     the files of a data set are not where they were looked for
    |   |-- ClusterError        the pod does not have what the plan needs
    |   `-- SdkError            the SDK that was asked for cannot be imported
    `-- RunError                exit code 1: the run was right and failed
        |-- InstanceFailed      one instance died or raised: host, instance, cause, log file
        |   `-- ProgramFailed   a launched program ended with another exit code than 0, which is the launch's too
        |-- CollectiveBroken    what an instance sees when another one is lost
        |-- HostLost            a host, or what raypod runs there, is gone
        |-- PeerLost            an instance cannot reach another one, or it is gone
        |-- WaitTimedOut        something did not happen within its stated bound
        |-- WeightsDiffer       instances disagree on the weights they start from
        |-- CheckpointDamaged   a file of a checkpoint is not what it was written as
        |-- CheckpointNotSaved  no checkpoint could be written where one has to be
        `-- LossNotFinite       the loss is no number any more

Errors cross processes: every field is positional, so that a pickled error arrives as what it was.
"""

from __future__ import annotations

import dataclasses
from typing import Dict, Tuple


class RaypodError(Exception):
    """Base of all errors that raypod raises on purpose."""

    exit_code = 1


class UserError(RaypodError):
    """Scene: somebody asked for what cannot be done; the message says what, where, and the way out."""

    exit_code = 2


class ConfigError(UserError):
    """Scene: `--batch-sice 8`, or 6 replicas for 4 instances."""


class DataMissing(ConfigError):
    """Scene: `--dataset cifar10` on a machine that has no CIFAR-10. A plan can be made there all the same."""


class ClusterError(UserError):
    """Scene: the plan needs 64 IPUs and the pod has 16, or a host of the cluster file is not alive."""


class SdkError(UserError):
    """Scene: `--device ipu` where the Poplar SDK is not sourced; carries the original import error."""


class RunError(RaypodError):
    """Scene: the request was right, and something failed on the way."""


@dataclasses.dataclass(eq=False)
class InstanceFailed(RunError):
    """Scene: the process of one instance was killed, or its program raised."""

    instance: int
    host: str
    cause: str
    log_file: str

    def __str__(self) -> str:
        return f"instance {self.instance} on host {self.host} failed: {self.cause}; its log: {self.log_file}"


@dataclasses.dataclass(eq=False)
class ProgramFailed(InstanceFailed):
    """Scene: `sys.exit(3)`, an uncaught exception or a signal in the program of one instance."""

    exit_code: int


@dataclasses.dataclass(eq=False)
class HostLost(RunError):
    """Scene: a host lost its power or its network, or somebody ended Ray there."""

    host: str
    instances: Tuple[int, ...]
    cause: str
    logs: str

    def __str__(self) -> str:
        told = ", ".join(map(str, self.instances))
        return f"host {self.host} is lost, with instance {told}: {self.cause}; the logs: {self.logs}"


@dataclasses.dataclass(eq=False)
class PeerLost(RunError):
    """Scene: the weights travel from host to host, and one of the hosts is cut off."""

    instance: int
    host: str
    peer: int
    peer_host: str
    cause: str

    def __str__(self) -> str:
        return (
            f"instance {self.instance} on host {self.host} lost instance {self.peer} on host {self.peer_host} "
            f"while the weights were seeded: {self.cause}"
        )


@dataclasses.dataclass(eq=False)
class CollectiveBroken(RunError):
    """Scene: another instance was lost in the middle of what this one does together with it. Never the first cause."""

    instance: int
    cause: str

    def __str__(self) -> str:
        return f"instance {self.instance} has lost others: {self.cause}"


@dataclasses.dataclass(eq=False)
class WaitTimedOut(RunError):
    """Scene: an actor did not start, or a call did not report, within its bound."""

    what: str
    timeout_s: float
    setting: str

    def __str__(self) -> str:
        return f"waited {self.timeout_s:g} s for {self.what}; {self.setting} sets this bound"


@dataclasses.dataclass(eq=False)
class WeightsDiffer(RunError):
    """Scene: after seeding, the hash of the weights is not the same in all instances."""

    hashes: Dict[int, str]

    def __str__(self) -> str:
        told = ", ".join(f"instance {index}: {value[:12]}" for index, value in sorted(self.hashes.items()))
        return f"the instances start from different weights ({told})"


@dataclasses.dataclass(eq=False)
class CheckpointDamaged(RunError):
    """Scene: a flipped byte, a file cut off, or one that something else has written."""

    path: str
    cause: str

    def __str__(self) -> str:
        return f"{self.path} is damaged: {self.cause}"


@dataclasses.dataclass(eq=False)
class CheckpointNotSaved(RunError):
    """Scene: the disk is full, and this is the first checkpoint or the last."""

    path: str
    cause: str
    way_out: str

    def __str__(self) -> str:
        return f"cannot write the checkpoint {self.path}: {self.cause}; {self.way_out}"


@dataclasses.dataclass(eq=False)
class LossNotFinite(RunError):
    """Scene: the learning rate is too high, or half precision needs loss scaling."""

    loss: float
    last_finite_update: int
    update: int
    way_out: str

    def __str__(self) -> str:
        return (
            f"the loss turned {self.loss} between update {self.last_finite_update} and update {self.update}; "
            f"{self.way_out}"
        )
