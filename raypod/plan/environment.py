"""The environment variables by which a process is an instance of a placement, for every SDK.

The POPDIST_*, IPUOF_* and POPLAR_* names are those that poprun sets.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Dict, Optional, Sequence, Tuple

from raypod.plan.cluster import VipuPartition
from raypod.plan.placement import InstanceSpec, Placement, gcd_index, num_gcds

IPUS_PER_LINK_DOMAIN = 64  # of a POD64, the largest IPU-Link domain
# The folder of the emulated SDK, for a program that finds no Horovod; see system/startup/sitecustomize.py.
HOROVOD_FALLBACK = "RAYPOD_HOROVOD_FALLBACK"
STARTUP_DIR = str(Path(__file__).parent.parent / "system" / "startup")


def placement_environment(placement: Placement, spec: InstanceSpec) -> Dict[str, str]:
    """Return the identity of an instance for popdist, `poptorch.Options()` (Open MPI's names) and Horovod."""
    hosts = [(host.name, len(placement.instances_on(number))) for number, host in enumerate(placement.hosts)]
    return {
        "POPDIST_NUM_TOTAL_REPLICAS": str(placement.sizes.total_replicas),
        "POPDIST_NUM_LOCAL_REPLICAS": str(spec.local_replicas),
        "POPDIST_NUM_IPUS_PER_REPLICA": str(placement.sizes.ipus_per_replica),
        "POPDIST_REPLICA_INDEX_OFFSET": str(spec.replica_offset),
        "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
        "POPDIST_LOCAL_INSTANCE_INDEX": str(spec.local_index),
        "OMPI_COMM_WORLD_SIZE": str(placement.sizes.num_instances),
        "OMPI_COMM_WORLD_RANK": str(spec.index),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(hosts[spec.host_index][1]),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(spec.local_index),
        "OMPI_COMM_WORLD_NODE_RANK": str(spec.local_index),
        # Without it, forked DataLoader workers hang on an IPU-POD.
        "RDMAV_FORK_SAFE": "1",
        # Always set: Ray sets OMP_NUM_THREADS=1 in its workers, torch uses all cores by default, and the rounding of
        # reductions depends on the number of threads.
        "OMP_NUM_THREADS": str(spec.threads_per_replica),
        "MKL_NUM_THREADS": str(spec.threads_per_replica),
        **horovod_identity(hosts, spec.index),
    }


def device_environment(placement: Placement, spec: InstanceSpec) -> Dict[str, str]:
    """Return the variables of the V-IPU partition of the cluster file; empty without one."""
    partition = placement.cluster.vipu
    if partition is None:
        return {}
    return vipu_environment(partition, gcd_index(spec, num_gcds(partition, placement)), placement)


def cache_environment(path: Optional[str]) -> Dict[str, str]:
    """Return the variables of the executable cache, for popdist and for PopTorch (inferred); empty without a path."""
    return {"POPTORCH_CACHE_DIR": path, "POPDIST_EXECUTABLE_CACHE_PATH": path} if path is not None else {}


def join_path(*entries: str) -> str:
    """Return a search path of the non-empty entries."""
    return ":".join(filter(None, entries))


def horovod_identity(hosts: Sequence[Tuple[str, int]], index: int) -> Dict[str, str]:
    """Return the HOROVOD_* variables of instance `index`.

    A Horovod rank is an instance, not a replica. A cross rank counts the hosts that have an instance of the same local
    rank.

    Args:
        hosts: (name, number of instances) of each host, in the order of the instances.
    """
    host_index, local_rank = 0, index
    while local_rank >= hosts[host_index][1]:
        local_rank -= hosts[host_index][1]
        host_index += 1
    across = [other for other, (_, slots) in enumerate(hosts) if slots > local_rank]
    return {
        "HOROVOD_HOSTNAME": hosts[host_index][0],
        "HOROVOD_RANK": str(index),
        "HOROVOD_SIZE": str(sum(slots for _, slots in hosts)),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(hosts[host_index][1]),
        "HOROVOD_CROSS_RANK": str(across.index(host_index)),
        "HOROVOD_CROSS_SIZE": str(len(across)),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def vipu_environment(partition: VipuPartition, gcd: int, placement: Placement) -> Dict[str, str]:
    """Return the variables by which the SDK of an instance finds its graph compile domain of a partition.

    The values of POPLAR_TARGET_OPTIONS are inferred: the SDK's documentation does not state them.
    """
    sizes = placement.sizes
    target = {
        "ipuLinkDomainSize": str(min(sizes.total_ipus // partition.link_domains or 1, IPUS_PER_LINK_DOMAIN)),
        "ipuLinkConfiguration": "slidingWindow",
        "ipuLinkTopology": "torus",
        "gatewayMode": "true",
        "instanceSize": str(sizes.local_ipus),
    }
    return {
        "IPUOF_VIPU_API_HOST": partition.server,
        "IPUOF_VIPU_API_PORT": str(partition.port),
        "IPUOF_VIPU_API_TIMEOUT": str(partition.timeout_s),
        "IPUOF_VIPU_API_PARTITION_ID": partition.partition,
        "IPUOF_VIPU_API_GCD_ID": str(gcd),
        "IPUOF_LOG_LEVEL": "WARN",
        "POPLAR_TARGET_OPTIONS": json.dumps(target, separators=(",", ":")),
    }
