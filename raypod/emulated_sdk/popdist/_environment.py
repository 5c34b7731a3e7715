"""Questions to the environment of an instance: the POPDIST_* variables (contract sections 6.1 and 6.3)."""

from __future__ import annotations

import os
from typing import Optional

_TOTAL = "POPDIST_NUM_TOTAL_REPLICAS"
_LOCAL = "POPDIST_NUM_LOCAL_REPLICAS"
_OFFSET = "POPDIST_REPLICA_INDEX_OFFSET"
_IPUS = "POPDIST_NUM_IPUS_PER_REPLICA"
_UNIFORM = "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"
_LOCAL_INDEX = "POPDIST_LOCAL_INSTANCE_INDEX"


def isPopdistEnvSet() -> bool:
    """Whether this process is an instance of a distributed run: POPDIST_NUM_TOTAL_REPLICAS is there."""
    return _TOTAL in os.environ


def getNumTotalReplicas() -> int:
    """Replicas of all instances; 1 outside a distributed run. RuntimeError for garbage in the variable."""
    return _number(_TOTAL, 1, least=1)


def getNumLocalReplicas() -> int:
    """Replicas of this instance; 1 outside a distributed run. RuntimeError for garbage, or more than all replicas."""
    total = getNumTotalReplicas()
    local = _number(_LOCAL, 1 if total == 1 else None, least=1)
    if local > total:
        raise RuntimeError(f"{_LOCAL}={local} is more than {_TOTAL}={total}")
    return local


def getReplicaIndexOffset() -> int:
    """Global index of this instance's first replica; 0 outside a distributed run. RuntimeError for garbage."""
    total, local = getNumTotalReplicas(), getNumLocalReplicas()
    offset = _number(_OFFSET, 0 if total == local else None, least=0)
    if offset + local > total:
        raise RuntimeError(f"{_OFFSET}={offset} and {_LOCAL}={local} lead beyond {_TOTAL}={total}")
    return offset


def getNumIpusPerReplica() -> int:
    """IPUs of each replica; 1 outside a distributed run. RuntimeError for garbage in the variable."""
    return _number(_IPUS, 1, least=1)


def checkNumIpusPerReplica(num_ipus: int) -> bool:
    """Whether a model of `num_ipus` IPUs is what the run was launched for."""
    return num_ipus == getNumIpusPerReplica()


def getNumInstances() -> int:
    """Instances of the run: total over local replicas, as no variable tells it. RuntimeError if not uniform."""
    total, local = getNumTotalReplicas(), _uniform_local_replicas()
    if total % local:
        raise RuntimeError(f"{_TOTAL}={total} is no multiple of {_LOCAL}={local}, though {_UNIFORM} is not 0")
    return total // local


def getInstanceIndex() -> int:
    """Index of this instance: its first replica over its replicas. RuntimeError if they are not uniform."""
    offset, local = getReplicaIndexOffset(), _uniform_local_replicas()
    if offset % local:
        raise RuntimeError(f"{_OFFSET}={offset} is no multiple of {_LOCAL}={local}, though {_UNIFORM} is not 0")
    return offset // local


def getLocalInstanceIndex() -> int:
    """Index of this instance among those of its host; 0 outside a distributed run."""
    return _number(_LOCAL_INDEX, 0, least=0)


def getDeviceId(ipus_per_replica: int = 0) -> int:
    """Id of the multi-IPU device of this instance; `ipus_per_replica` 0 stands for the run's own number.

    [I] As a system of T IPUs numbers its devices: T single ones, then T/2 pairs, T/4 quadruples and so on, T rounded
    up to a power of two. (Known: 8 replicas of 2 IPUs in 4 instances have the ids 24 to 27.) RuntimeError if the
    replicas are not uniform or an instance's IPUs are not a power of two.
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
            f"{_UNIFORM}=0: instances with different numbers of replicas have neither index nor count; use"
            " getReplicaIndexOffset(), getNumLocalReplicas() and getNumTotalReplicas()"
        )
    return getNumLocalReplicas()


def _number(variable: str, default: Optional[int], least: int) -> int:
    """The variable's value; outside a distributed run, or where it may be missing, the default."""
    text = os.environ.get(variable) if isPopdistEnvSet() else None
    if text is None:
        if default is None:
            raise RuntimeError(f"{variable} is not set, though {_TOTAL}={os.environ[_TOTAL]} is")
        return default
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise RuntimeError(f"{variable}={text!r} is not a whole number of at least {least}")
    return number
