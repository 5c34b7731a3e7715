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
class Sizes:
    """The number of replicas, instances and IPUs of a run, and what follows from them.

    Raises:
        ConfigError: the replicas cannot be divided equally, or an instance would use too many IPUs.
    """

    total_replicas: int
    num_instances: int
    ipus_per_replica: int  # 0: the run uses no IPUs

    def __post_init__(self) -> None:
        total, instances, ipus = self.total_replicas, self.num_instances, self.ipus_per_replica
        if total % instances:
            divisors = [n for n in range(1, total + 1) if total % n == 0]
            raise ConfigError(
                f"{total} replicas cannot be divided equally between {instances} instances; "
                f"--num-instances can be {', '.join(map(str, divisors))}"
            )
        if self.local_ipus > IPUS_PER_PROCESS:
            raise ConfigError(
                f"one instance would use {self.local_replicas} replicas x {ipus} IPUs = {self.local_ipus} IPUs, and a "
                f"process can use {IPUS_PER_PROCESS}; use --num-instances {-(-self.total_ipus // IPUS_PER_PROCESS)} "
                "or more"
            )

    @property
    def local_replicas(self) -> int:
        """Replicas of one instance."""
        return self.total_replicas // self.num_instances

    @property
    def local_ipus(self) -> int:
        """IPUs of one instance."""
        return self.local_replicas * self.ipus_per_replica

    @property
    def total_ipus(self) -> int:
        """IPUs of the run."""
        return self.total_replicas * self.ipus_per_replica


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
    sizes: Sizes
    instances: Tuple[InstanceSpec, ...]

    @property
    def hosts(self) -> Tuple[Host, ...]:
        """The hosts that have instances, in order."""
        return self.cluster.hosts[: self.instances[-1].host_index + 1]

    @property
    def binds_numa(self) -> bool:
        """Whether instances are bound to NUMA nodes: where the cluster file wishes it and a host has several."""
        return self.cluster.numa and self.instances[-1].local_index > 0

    def instances_on(self, host_index: int) -> List[InstanceSpec]:
        """The instances of one host."""
        return [spec for spec in self.instances if spec.host_index == host_index]

    def ipus_on(self, host_index: int) -> int:
        """IPUs that the instances of one host drive."""
        return len(self.instances_on(host_index)) * self.sizes.local_ipus


def place(cluster: Cluster, sizes: Sizes, threads_per_replica: int = 1) -> Placement:
    """Return a placement with the same number of instances on every host that is used.

    `threads_per_replica` 0 divides the cores of a host between its replicas.

    Raises:
        ConfigError: the instances cannot be divided equally between the hosts.
        ClusterError: a host has fewer IPUs than its instances need.
    """
    num_hosts = min(len(cluster.hosts), sizes.num_instances)
    per_host, rest = divmod(sizes.num_instances, num_hosts)
    if rest:
        raise ConfigError(
            f"{sizes.num_instances} instances cannot be divided equally between the {num_hosts} hosts of "
            f"{cluster.name}; --num-instances can be a multiple of {num_hosts}"
        )
    specs = []
    for index in range(sizes.num_instances):
        host_index, local_index = divmod(index, per_host)
        host = cluster.hosts[host_index]
        cores = host.cpus or os.cpu_count() or 1
        specs.append(
            InstanceSpec(
                index=index,
                host=host.name,
                host_index=host_index,
                local_index=local_index,
                replica_offset=index * sizes.local_replicas,
                local_replicas=sizes.local_replicas,
                threads_per_replica=threads_per_replica or max(1, cores // (per_host * sizes.local_replicas)),
            )
        )
    placement = Placement(cluster, sizes, tuple(specs))
    _check_against_pod(placement)
    return placement


def _check_against_pod(placement: Placement) -> None:
    for host_index, host in enumerate(placement.hosts):
        needed = placement.ipus_on(host_index)
        if host.ipus is not None and needed > host.ipus:
            raise ClusterError(
                f"host {host.name} of {placement.cluster.name} has {host.ipus} IPUs and the plan puts {needed} on it "
                f"({placement.sizes.total_ipus} IPUs over {len(placement.hosts)} hosts); use fewer replicas or more hosts"
            )


def check_ilds(placement: Placement, num_ilds: Optional[int]) -> None:
    """Raise ConfigError if instances cannot be divided equally between IPU-Link domains."""
    if num_ilds and placement.sizes.num_instances % num_ilds:
        raise ConfigError(
            f"{placement.sizes.num_instances} instances cannot be divided equally between {num_ilds} IPU-Link domains; "
            f"--num-instances can be a multiple of {num_ilds}"
        )


# --- from host.devices: Where an instance sits in the partition of a pod: its IPU-Link domain, its GCD, its device (contract sections 6, 9).
#
# Numbers for the plan and for the environment of an instance; nothing here asks a device. [I] marks what is inferred.
#


def link_domain_index(spec: InstanceSpec, placement: Placement, link_domains: int) -> int:
    """The IPU-Link domain of an instance: equal blocks of consecutive instances [I]."""
    return spec.index * link_domains // placement.sizes.num_instances


def gcd_index(spec: InstanceSpec, gcds: int) -> int:
    """The graph compile domain of an instance: its own, or the only one, which a reconfigurable partition has."""
    return spec.index if gcds > 1 else 0


def num_gcds(partition: VipuPartition, placement: Placement) -> int:
    """GCDs of a partition: what the file says of it, else one per instance."""
    return partition.gcds or placement.sizes.num_instances


def device_id(spec: InstanceSpec, placement: Placement) -> Optional[int]:
    """The multi-IPU device of an instance; None where its IPUs are no power of two.

    [I] A system of T IPUs numbers T single devices first, then T/2 pairs, T/4 quadruples and so on, T rounded up to a
    power of two. Known: 8 replicas of 2 IPUs in 4 instances have the ids 24 to 27 (contract section 6.3).
    """
    ipus = placement.sizes.local_ipus
    if ipus & (ipus - 1):
        return None
    system = 1 << (placement.sizes.total_ipus - 1).bit_length()
    return 2 * (system - system // ipus) + spec.index


def partition_conflict(partition: VipuPartition, placement: Placement) -> Optional[str]:
    """Why a run cannot use a partition, and the way out; None where it can."""
    gcds, instances = num_gcds(partition, placement), placement.sizes.num_instances
    if gcds not in (1, instances):
        return (
            f"partition {partition.partition} has {gcds} GCDs and the run {instances} instances, one for each: "
            f"use --num-instances {gcds}, or a partition made for {instances}"
        )
    if partition.size is not None and partition.size < placement.sizes.total_ipus:
        return f"partition {partition.partition} has {partition.size} IPUs and the run needs {placement.sizes.total_ipus}"
    return None
