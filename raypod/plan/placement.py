"""Where the instances of a run sit: replicas over instances over hosts. Never part of the arithmetic of a run.

What a launcher and a trainer have in common: it knows replicas and IPUs, and nothing of batches, models or data.
"""

from __future__ import annotations

import dataclasses
import os
from typing import List, Optional, Tuple

from raypod.errors import ClusterError, ConfigError
from raypod.plan.cluster import Cluster, Host, VipuPartition

IPUS_PER_PROCESS = 64  # contract section 3: more need more instances


@dataclasses.dataclass(frozen=True)
class InstanceSpec:
    """One instance: which host, which replicas, how many threads."""

    index: int
    host: str
    host_index: int
    local_index: int  # among the instances of its host
    replica_offset: int
    local_replicas: int
    threads_per_replica: int


@dataclasses.dataclass(frozen=True)
class Placement:
    """The instances of a run, the same number on every host that carries any, in host order."""

    cluster: Cluster
    total_replicas: int
    ipus_per_replica: int
    instances: Tuple[InstanceSpec, ...]

    @property
    def hosts(self) -> Tuple[Host, ...]:
        """The hosts that carry instances, in order."""
        return self.cluster.hosts[: self.instances[-1].host_index + 1]

    @property
    def local_replicas(self) -> int:
        """Replicas of one instance."""
        return self.total_replicas // len(self.instances)

    @property
    def local_ipus(self) -> int:
        """IPUs of one instance."""
        return self.local_replicas * self.ipus_per_replica

    @property
    def total_ipus(self) -> int:
        """IPUs of the run."""
        return self.total_replicas * self.ipus_per_replica

    @property
    def binds_numa(self) -> bool:
        """Whether instances are bound to NUMA nodes: where the cluster file wishes it and a host has several."""
        return self.cluster.numa and self.instances[-1].local_index > 0

    def instances_on(self, host_index: int) -> List[InstanceSpec]:
        """The instances of one host."""
        return [spec for spec in self.instances if spec.host_index == host_index]

    def ipus_on(self, host_index: int) -> int:
        """IPUs that the instances of one host drive."""
        return len(self.instances_on(host_index)) * self.local_ipus


def place(
    cluster: Cluster, total_replicas: int, num_instances: int, ipus_per_replica: int = 1, threads_per_replica: int = 1
) -> Placement:
    """Spread instances evenly over the hosts of a cluster; `threads_per_replica` 0 stands for a host's cores.

    Raises:
        ConfigError: numbers that cannot be divided, or more IPUs than one process can drive.
        ClusterError: a host does not have the IPUs that its instances need.
    """
    check_sizes(total_replicas, num_instances, ipus_per_replica)
    num_hosts = min(len(cluster.hosts), num_instances)
    per_host, rest = divmod(num_instances, num_hosts)
    if rest:
        raise ConfigError(
            f"{num_instances} instances cannot be spread evenly over the {num_hosts} hosts of {cluster.name}; "
            f"--num-instances can be a multiple of {num_hosts}"
        )
    local_replicas = total_replicas // num_instances
    specs = []
    for index in range(num_instances):
        host_index, local_index = divmod(index, per_host)
        host = cluster.hosts[host_index]
        cores = host.cpus or os.cpu_count() or 1
        specs.append(
            InstanceSpec(
                index=index,
                host=host.name,
                host_index=host_index,
                local_index=local_index,
                replica_offset=index * local_replicas,
                local_replicas=local_replicas,
                threads_per_replica=threads_per_replica or max(1, cores // (per_host * local_replicas)),
            )
        )
    placement = Placement(cluster, total_replicas, ipus_per_replica, tuple(specs))
    _check_against_pod(placement)
    return placement


def check_sizes(total_replicas: int, num_instances: int, ipus_per_replica: int) -> None:
    """Raise ConfigError if replicas cannot be divided equally, or an instance would drive too many IPUs."""
    if total_replicas % num_instances:
        fits = [n for n in range(1, total_replicas + 1) if total_replicas % n == 0]
        raise ConfigError(
            f"{total_replicas} replicas cannot be divided equally between {num_instances} instances; "
            f"--num-instances can be {', '.join(map(str, fits))}"
        )
    local_replicas = total_replicas // num_instances
    if local_replicas * ipus_per_replica > IPUS_PER_PROCESS:
        raise ConfigError(
            f"one instance would drive {local_replicas} replicas x {ipus_per_replica} IPUs = "
            f"{local_replicas * ipus_per_replica} IPUs, and a process can drive {IPUS_PER_PROCESS}; "
            f"use more instances: --num-instances {-(-total_replicas * ipus_per_replica // IPUS_PER_PROCESS)} or more"
        )


def _check_against_pod(placement: Placement) -> None:
    for host_index, host in enumerate(placement.hosts):
        needed = placement.ipus_on(host_index)
        if host.ipus is not None and needed > host.ipus:
            raise ClusterError(
                f"host {host.name} of {placement.cluster.name} has {host.ipus} IPUs and the plan puts {needed} on it "
                f"({placement.total_ipus} IPUs over {len(placement.hosts)} hosts); use fewer replicas or more hosts"
            )


def check_ilds(placement: Placement, num_ilds: Optional[int]) -> None:
    """Raise ConfigError if instances cannot be divided equally between IPU-Link domains."""
    if num_ilds and len(placement.instances) % num_ilds:
        raise ConfigError(
            f"{len(placement.instances)} instances cannot be divided equally between {num_ilds} IPU-Link domains; "
            f"--num-instances can be a multiple of {num_ilds}"
        )


# --- from host.devices: Where an instance sits in the partition of a pod: its IPU-Link domain, its GCD, its device (contract sections 6, 9).
#
# Numbers for the plan and for the environment of an instance; nothing here asks a device. [I] marks what is inferred.
#


def link_domain_of(spec: InstanceSpec, placement: Placement, link_domains: int) -> int:
    """The IPU-Link domain of an instance: equal blocks of consecutive instances [I]."""
    return spec.index * link_domains // len(placement.instances)


def gcd_of(spec: InstanceSpec, gcds: int) -> int:
    """The graph compile domain of an instance: its own, or the only one, which a reconfigurable partition has."""
    return spec.index if gcds > 1 else 0


def gcds_of(partition: VipuPartition, placement: Placement) -> int:
    """GCDs of a partition: what the file says of it, else one per instance."""
    return partition.gcds or len(placement.instances)


def device_id_of(spec: InstanceSpec, placement: Placement) -> Optional[int]:
    """The multi-IPU device of an instance; None where its IPUs are no power of two.

    [I] A system of T IPUs numbers T single devices first, then T/2 pairs, T/4 quadruples and so on, T rounded up to a
    power of two. Known: 8 replicas of 2 IPUs in 4 instances have the ids 24 to 27 (contract section 6.3).
    """
    ipus = placement.local_ipus
    if ipus & (ipus - 1):
        return None
    system = 1 << (placement.total_ipus - 1).bit_length()
    return 2 * (system - system // ipus) + spec.index


def misfit_of(partition: VipuPartition, placement: Placement) -> Optional[str]:
    """Why a run cannot use a partition, and the way out; None where it can."""
    gcds, instances = gcds_of(partition, placement), len(placement.instances)
    if gcds not in (1, instances):
        return (
            f"partition {partition.partition} has {gcds} GCDs and the run {instances} instances, one for each: "
            f"use --num-instances {gcds}, or a partition made for {instances}"
        )
    if partition.size is not None and partition.size < placement.total_ipus:
        return f"partition {partition.partition} has {partition.size} IPUs and the run needs {placement.total_ipus}"
    return None
