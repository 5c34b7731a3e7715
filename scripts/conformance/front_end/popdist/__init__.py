"""`popdist` as it is documented: the position of the process from POPDIST_*; `init` needs MPI, once per process."""

from __future__ import annotations

import atexit
import os

_has_begun = _has_ended = False


def _number(name: str, default: int) -> int:
    return int(os.environ.get(f"POPDIST_{name}", default))


def isPopdistEnvSet() -> bool:
    """Whether a launcher has started this process."""
    return "POPDIST_NUM_TOTAL_REPLICAS" in os.environ


def getNumTotalReplicas() -> int:
    """Replicas of all instances."""
    return _number("NUM_TOTAL_REPLICAS", 1)


def getNumLocalReplicas() -> int:
    """Replicas of this instance."""
    return _number("NUM_LOCAL_REPLICAS", 1)


def getReplicaIndexOffset() -> int:
    """The first replica of this instance."""
    return _number("REPLICA_INDEX_OFFSET", 0)


def getNumIpusPerReplica() -> int:
    """IPUs of a replica."""
    return _number("NUM_IPUS_PER_REPLICA", 1)


def checkNumIpusPerReplica(num_ipus: int) -> bool:
    """Whether a replica has as many IPUs."""
    return num_ipus == getNumIpusPerReplica()


def getNumInstances() -> int:
    """The number of instances."""
    return getNumTotalReplicas() // getNumLocalReplicas()


def getInstanceIndex() -> int:
    """The number of this instance."""
    return getReplicaIndexOffset() // getNumLocalReplicas()


def getDeviceId(ipus_per_replica: int = 0) -> int:
    """The device of this instance."""
    del ipus_per_replica
    return getInstanceIndex()


def init() -> None:
    """MPI_Init."""
    global _has_begun
    if _has_ended:
        raise RuntimeError("The MPI_Init() function was called after MPI_FINALIZE was invoked.")
    if _has_begun:
        raise RuntimeError("Calling MPI_Init() or MPI_Init_thread() more than once is erroneous.")
    if os.environ.get("FRONT_END_MPI", "0") != "1":
        raise RuntimeError("MPI_Init() failed: this process was not started by mpirun")
    _has_begun = True


def isBackendInitialized() -> bool:
    """Whether MPI is initialized."""
    return _has_begun and not _has_ended


def finalizeBackend() -> None:
    """MPI_Finalize."""
    global _has_ended
    if not _has_begun or _has_ended:
        raise RuntimeError("The MPI_Finalize() function was called before MPI_INIT or after MPI_FINALIZE.")
    _has_ended = True


def synchronize() -> None:
    """A barrier. Of one instance only: this module has no MPI."""
    if getNumInstances() > 1:
        raise RuntimeError("this popdist has no MPI to synchronize with")


@atexit.register
def _finalize_at_exit() -> None:
    if isBackendInitialized():
        finalizeBackend()
