"""`popdist`, emulated: the position of this process in a distributed run, and the connection between instances.

The position comes from the POPDIST_* environment variables, which are read at every call. Without them every function
describes a run of one instance with one replica of one IPU.
"""

from __future__ import annotations

import atexit
import os
from typing import Any, Callable, Collection, Optional, TypeVar

from _pod import wires

__all__ = [
    "checkNumIpusPerReplica",
    "execute_on_instances",
    "finalizeBackend",
    "getDeviceId",
    "getInstanceIndex",
    "getLocalInstanceIndex",
    "getNumInstances",
    "getNumIpusPerReplica",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "getReplicaIndexOffset",
    "init",
    "isBackendInitialized",
    "isPopdistEnvSet",
    "synchronize",
]

_TOTAL = "POPDIST_NUM_TOTAL_REPLICAS"
_LOCAL = "POPDIST_NUM_LOCAL_REPLICAS"
_OFFSET = "POPDIST_REPLICA_INDEX_OFFSET"
_IPUS = "POPDIST_NUM_IPUS_PER_REPLICA"
_UNIFORM = "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"
_LOCAL_INDEX = "POPDIST_LOCAL_INSTANCE_INDEX"

_GROUP = "popdist"
_is_initialized = _is_finalized = False
_Result = TypeVar("_Result")


def isPopdistEnvSet() -> bool:
    """Return whether this process is an instance of a distributed run: POPDIST_NUM_TOTAL_REPLICAS is set."""
    return _TOTAL in os.environ


def getNumTotalReplicas() -> int:
    """Return the number of replicas of all instances; RuntimeError if the variable is invalid."""
    return _number(_TOTAL, 1, least=1)


def getNumLocalReplicas() -> int:
    """Return the number of replicas of this instance; RuntimeError if it is invalid or above the total."""
    total = getNumTotalReplicas()
    local = _number(_LOCAL, 1 if total == 1 else None, least=1)
    if local > total:
        raise RuntimeError(f"{_LOCAL}={local} is more than {_TOTAL}={total}")
    return local


def getReplicaIndexOffset() -> int:
    """Return the global index of this instance's first replica; RuntimeError if the variables are invalid."""
    total, local = getNumTotalReplicas(), getNumLocalReplicas()
    offset = _number(_OFFSET, 0 if total == local else None, least=0)
    if offset + local > total:
        raise RuntimeError(f"{_OFFSET}={offset} plus {_LOCAL}={local} exceeds {_TOTAL}={total}")
    return offset


def getNumIpusPerReplica() -> int:
    """Return the number of IPUs of each replica; RuntimeError if the variable is invalid."""
    return _number(_IPUS, 1, least=1)


def checkNumIpusPerReplica(num_ipus: int) -> bool:
    """Return whether the run was launched with `num_ipus` IPUs per replica."""
    return num_ipus == getNumIpusPerReplica()


def getNumInstances() -> int:
    """Return the number of instances: total over local replicas. RuntimeError if the replicas are not uniform."""
    total, local = getNumTotalReplicas(), _uniform_local_replicas()
    if total % local:
        raise RuntimeError(f"{_TOTAL}={total} is not a multiple of {_LOCAL}={local}, although {_UNIFORM} is not 0")
    return total // local


def getInstanceIndex() -> int:
    """Return the index of this instance: replica offset over local replicas. RuntimeError if they are not uniform."""
    offset, local = getReplicaIndexOffset(), _uniform_local_replicas()
    if offset % local:
        raise RuntimeError(f"{_OFFSET}={offset} is not a multiple of {_LOCAL}={local}, although {_UNIFORM} is not 0")
    return offset // local


def getLocalInstanceIndex() -> int:
    """Return the index of this instance among those of its host."""
    return _number(_LOCAL_INDEX, 0, least=0)


def getDeviceId(ipus_per_replica: int = 0) -> int:
    """Return the id of this instance's multi-IPU device; `ipus_per_replica` 0 means the launched number.

    A system of T IPUs, rounded up to a power of two, numbers its devices: T single IPUs, then T/2 pairs, T/4
    quadruples and so on (inferred: the SDK's documentation does not state this; known: 8 replicas of 2 IPUs in 4
    instances have the ids 24 to 27).

    Raises:
        RuntimeError: the replicas are not uniform, or the number of an instance's IPUs is not a power of two.
    """
    if ipus_per_replica < 0:
        raise RuntimeError(f"a replica cannot have {ipus_per_replica} IPUs")
    per_replica = ipus_per_replica or getNumIpusPerReplica()
    ipus = per_replica * _uniform_local_replicas()
    if ipus & (ipus - 1):
        raise RuntimeError(f"an instance of {ipus} IPUs has no device: the number must be a power of two")
    system = 1 << (per_replica * getNumTotalReplicas() - 1).bit_length()
    return 2 * (system - system // ipus) + getInstanceIndex()


def _uniform_local_replicas() -> int:
    if not _number(_UNIFORM, 1, least=0):
        raise RuntimeError(
            f"{_UNIFORM}=0: instances with different numbers of replicas have no index or count; use"
            " getReplicaIndexOffset(), getNumLocalReplicas() and getNumTotalReplicas()"
        )
    return getNumLocalReplicas()


def _number(variable: str, default: Optional[int], least: int) -> int:
    """Return the variable's value, or the default if it is not set or this is not a distributed run."""
    text = os.environ.get(variable) if isPopdistEnvSet() else None
    if text is None:
        if default is None:
            raise RuntimeError(f"{variable} is not set, although {_TOTAL}={os.environ[_TOTAL]} is")
        return default
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise RuntimeError(f"{variable}={text!r} is not an integer of at least {least}")
    return number


def init() -> None:
    """Connect this instance with all others; all instances must call it. Disconnects at exit.

    Later calls have no effect (inferred: the SDK's documentation does not state this), but after `finalizeBackend` they
    are an error, as PopDist uses MPI.

    Raises:
        RuntimeError: an instance (named) has not joined in time, the rendezvous is not set, or this process has called
            `finalizeBackend`.
    """
    global _is_initialized
    if _is_finalized:
        raise RuntimeError(
            "popdist.init() after popdist.finalizeBackend(): MPI can be initialized only once in a process; start a new"
            " one"
        )
    wires.connect(_GROUP, getInstanceIndex(), getNumInstances())
    _is_initialized = True


def isBackendInitialized() -> bool:
    """Return whether `init` was called, and `finalizeBackend` was not called since."""
    return _is_initialized


def finalizeBackend() -> None:
    """Disconnect from the other instances, for good: this process cannot call `init` again. Idempotent."""
    global _is_initialized, _is_finalized
    wires.disconnect(_GROUP)
    _is_initialized, _is_finalized = False, _is_finalized or _is_initialized


atexit.register(finalizeBackend)


def synchronize() -> None:
    """Wait until all instances have called it. A run of one instance needs no `init` (inferred).

    Raises:
        RuntimeError: `init` was not called, or an instance is lost or does not call in time.
    """
    size = getNumInstances()
    if size == 1:
        return
    if not _is_initialized:
        raise RuntimeError("popdist is not initialized; call popdist.init() in every instance first")
    wires.connect(_GROUP, getInstanceIndex(), size).barrier()


def execute_on_instances(
    instances: Collection[int], func: Callable[..., _Result], *args: Any, **kwargs: Any
) -> Optional[_Result]:
    """Return func(*args, **kwargs) if this instance is in `instances`, else None without calling it.

    Does not synchronize the instances and does not send the value to them.

    Raises:
        TypeError: `instances` is not a collection of integers, or `func` is not callable.
    """
    if not isinstance(instances, Collection) or not all(isinstance(index, int) for index in instances):
        raise TypeError(
            f"execute_on_instances: `instances` must be a set of instance indices such as {{0}}, got {instances!r}"
        )
    if not callable(func):
        raise TypeError(f"execute_on_instances: `func` must be callable, got {func!r}")
    return func(*args, **kwargs) if getInstanceIndex() in instances else None
