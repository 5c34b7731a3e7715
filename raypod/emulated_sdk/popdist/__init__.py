"""`popdist`, emulated: which part of a distributed run this process is (contract section 6).

The environment says it (POPDIST_*, section 6.3), read at every call, so that a launcher may set it at any time
before. Outside a distributed run every question has the answer of a run with one instance of one replica of one IPU.
"""

from __future__ import annotations

from popdist._backend import execute_on_instances, finalizeBackend, init, isBackendInitialized, synchronize
from popdist._environment import (
    checkNumIpusPerReplica,
    getDeviceId,
    getInstanceIndex,
    getLocalInstanceIndex,
    getNumInstances,
    getNumIpusPerReplica,
    getNumLocalReplicas,
    getNumTotalReplicas,
    getReplicaIndexOffset,
    isPopdistEnvSet,
)

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
