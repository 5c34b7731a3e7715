"""The error classes. A wrong request is a UserError: one line on stderr and exit code 2, never a traceback.

    RaypodError
    |-- UserError               exit code 2: the request is wrong
    |   |-- ConfigError         a wrong key or value, or values that contradict each other
    |   |   |-- DataMissing     the files of a data set are missing
    |   |   `-- LeaseHeld       another process uses the run folder
    |   |-- ClusterError        the pod lacks something that the plan needs
    |   `-- SdkError            the requested SDK cannot be imported
    `-- RunError                exit code 1: the request is valid and the run failed
        |-- InstanceFailed      an instance died or raised an exception
        |   |-- ProgramFailed   a launched program failed; its exit code is that of the launch
        |   `-- FunctionFailed  the function of `raypod.run` raised an exception, or its process died
        |-- DataUnreadable      the disk or network of the data has not returned in time
        |-- CollectiveBroken    a collective operation failed because another instance was lost
        |   `-- DeviceFailed    a call ended with an error of the device
        |-- HostLost            a host, or the raypod process on it, was lost
        |-- PeerLost            an instance cannot reach another one
        |-- LeaseLost           another process has taken over the run folder
        |   `-- FolderLost      the disk of the run folder was unmounted, or the folder moved or removed
        |-- WaitTimedOut        a wait exceeded its timeout
        |-- WeightsDiffer       instances start from different weights
        |-- CheckpointDamaged   a checkpoint file does not match its checksum
        |-- CheckpointNotSaved  a required checkpoint could not be written
        `-- LossNotFinite       the loss is NaN or infinite

Errors cross process boundaries. All their fields are positional arguments, so that they can be pickled.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Dict, Tuple

_NO_UTF8 = re.compile("[\udc80-\udcff]")  # how Python represents such bytes of file names


def summarize_exception(error: BaseException) -> str:
    """Return an exception in one line. The message of a data loader worker's exception is its whole traceback."""
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    text = f"{name}: {error}"
    head, is_of_worker, traceback = text.partition("Original Traceback (most recent call last)")
    if is_of_worker:
        where = head.rpartition(" in ")[2].strip().rstrip(".")
        text = f"{traceback.strip().splitlines()[-1]} (in {where})"
    return as_utf8(" ".join(text.split()))


def as_utf8(text: str) -> str:
    r"""Return text that can be written as UTF-8: bytes of a file name that are none become \xNN."""
    readable = _NO_UTF8.sub(lambda byte: f"\\x{ord(byte.group()) - 0xDC00:02x}", text)
    return readable.encode("utf-8", "backslashreplace").decode()


class RaypodError(Exception):
    """Base class of the errors that raypod raises."""

    exit_code = 1


class Preempted(KeyboardInterrupt):
    """Raised if a preemption ends a run before its last checkpoint is written; that one is the newest before.

    It is a KeyboardInterrupt, as the interruption by any other signal.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message, exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return str(self.args[0])


class UserError(RaypodError):
    """Raised for a wrong request; the message states what is wrong, where, and what to do."""

    exit_code = 2


class ConfigError(UserError):
    """Raised for a wrong setting, such as `--batch-sice 8` or 6 replicas for 4 instances."""


class DataMissing(ConfigError):
    """Raised if the files of a data set are missing, such as `--dataset cifar10` without CIFAR-10.

    Planning does not need the files: it uses the published size of the data set.
    """


@dataclasses.dataclass(eq=False)
class LeaseHeld(ConfigError):
    """Raised if a command would use a run folder that another process uses, on this host or on another one."""

    folder: str
    holder: str
    hint: str

    def __str__(self) -> str:
        return f"{self.folder} is in use by {self.holder}" + (f"; {self.hint}" if self.hint else "")


class ClusterError(UserError):
    """Raised if the plan needs 64 IPUs and the pod has 16, or a host of the cluster file is not alive."""


class PodTooSmall(ClusterError):
    """Raised if hosts of the plan have not joined the Ray cluster, or have fewer IPUs than the plan puts on them."""


class SdkError(UserError):
    """Raised for `--device ipu` if the Poplar SDK is not enabled; the message contains the import error."""


class RunError(RaypodError):
    """Raised if a valid request fails."""


@dataclasses.dataclass(eq=False)
class InstanceFailed(RunError):
    """Raised if the process of an instance died or its program raised an exception."""

    instance: int
    host: str
    cause: str
    log_file: str

    def __str__(self) -> str:
        return f"instance {self.instance} on host {self.host} failed: {self.cause}; its log: {self.log_file}"


@dataclasses.dataclass(eq=False)
class ProgramFailed(InstanceFailed):
    """Raised if a launched program exits with an exit code other than 0 or dies from a signal."""

    exit_code: int


@dataclasses.dataclass(eq=False)
class FunctionFailed(InstanceFailed):
    """Raised if the function of `raypod.run` raised an exception in an instance, or the process of an instance died.

    `__cause__` is the exception of the function, if it can be pickled. `log_file` is empty: `traceback` holds the
    traceback in the instance, empty if its process died.
    """

    traceback: str = ""

    def __str__(self) -> str:
        trace = f"\n\nIn instance {self.instance}:\n{self.traceback}" if self.traceback else ""
        return f"instance {self.instance} on host {self.host} failed: {self.cause}{trace}"


@dataclasses.dataclass(eq=False)
class HostLost(RunError):
    """Raised if a host loses power or network, or if Ray ends on it."""

    host: str
    instances: Tuple[int, ...]
    cause: str
    logs: str

    def __str__(self) -> str:
        instances = ", ".join(map(str, self.instances))
        return f"host {self.host} is lost, with instance {instances}: {self.cause}; the logs: {self.logs}"


@dataclasses.dataclass(eq=False)
class PeerLost(RunError):
    """Raised if an instance loses its connection to another one while the weights are seeded."""

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
class DataUnreadable(RunError):
    """Raised if an instance cannot read samples, and its disk or network does not return in time."""

    instance: int
    host: str
    timeout_s: float
    cause: str

    def __str__(self) -> str:
        where = f"instance {self.instance} on host {self.host}"
        return f"{where} cannot read samples for {self.timeout_s:g} s (run.read_retry_s): {self.cause}"


@dataclasses.dataclass(eq=False)
class CollectiveBroken(RunError):
    """Raised if a collective operation fails because another instance was lost. It is never the root cause."""

    instance: int
    cause: str

    def __str__(self) -> str:
        return f"instance {self.instance} lost its connection to other instances: {self.cause}"


@dataclasses.dataclass(eq=False)
class DeviceFailed(CollectiveBroken):
    """Raised if the SDK's core ends a call with an error of the device; its state is unknown then.

    `recovery_action` is the SDK's: IPU_RESET, LINK_RESET, PARTITION_RESET or FULL_RESET, UNRECOVERABLE for an
    UnrecoverableError, "" if it names none.
    """

    recovery_action: str

    def __str__(self) -> str:
        return f"the device of instance {self.instance} has failed: {self.cause}"


@dataclasses.dataclass(eq=False)
class LeaseLost(RunError):
    """Raised in a run whose folder another process has taken over; the run writes nothing more into it."""

    folder: str
    holder: str

    def __str__(self) -> str:
        return f"{self.holder} has taken over {self.folder}; this run ends and writes nothing more into it"


class FolderLost(LeaseLost):
    """Raised in a run whose run folder is gone: its disk was unmounted, or it was moved or removed."""

    def __init__(self, folder: str, way_on: str = "") -> None:
        """`way_on` says where the newest state was saved, and how the run continues from there."""
        super().__init__(folder, "")
        self.way_on = way_on

    def __str__(self) -> str:
        way_on = self.way_on or (
            f"once it is back, continue with --resume {self.folder}; otherwise resume from --storage-path, or a copy "
            "on another host"
        )
        return (
            f"the path {self.folder} no longer leads to the folder that this run has written into: its disk was "
            f"unmounted, or the folder was moved or removed; this run ends and writes nothing more; {way_on}"
        )


@dataclasses.dataclass(eq=False)
class WaitTimedOut(RunError):
    """Raised if an actor does not start, or a call does not report, within its timeout."""

    what: str
    timeout_s: float
    setting: str

    def __str__(self) -> str:
        return f"waited {self.timeout_s:g} s for {self.what}; {self.setting} sets this timeout"


@dataclasses.dataclass(eq=False)
class WeightsDiffer(RunError):
    """Raised if the hash of the weights differs between instances after seeding."""

    hashes: Dict[int, str]

    def __str__(self) -> str:
        hashes = ", ".join(f"instance {index}: {value[:12]}" for index, value in sorted(self.hashes.items()))
        return f"the instances start from different weights ({hashes})"


@dataclasses.dataclass(eq=False)
class CheckpointDamaged(RunError):
    """Raised if a checkpoint file is truncated, modified or overwritten."""

    path: str
    cause: str

    def __str__(self) -> str:
        return f"{self.path} is damaged: {self.cause}"


@dataclasses.dataclass(eq=False)
class CheckpointNotSaved(RunError):
    """Raised if the first, the last or too many checkpoints cannot be written, as on a disk that stays full."""

    path: str
    cause: str
    hint: str

    def __str__(self) -> str:
        return f"cannot write the checkpoint {self.path}: {self.cause}; {self.hint}"


@dataclasses.dataclass(eq=False)
class LossNotFinite(RunError):
    """Raised if the loss is NaN or infinite: the learning rate is too high, or half precision needs loss scaling."""

    loss: float
    last_finite_update: int
    update: int
    hint: str

    def __str__(self) -> str:
        return (
            f"the loss became {self.loss} between update {self.last_finite_update} and update {self.update}; "
            f"{self.hint}"
        )
