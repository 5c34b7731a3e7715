"""The placement of a run: replicas on instances, instances on hosts, and instances in a V-IPU partition.

`raypod train` and `raypod launch` share it. With equal replicas, the placement does not change the results of a run.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Dict, List, Optional, Sequence, Tuple

from raypod.errors import ClusterError, ConfigError
from raypod.plan.cluster import Cluster, Host, VipuPartition
from raypod.system.command_line import counted

IPUS_PER_PROCESS = 64  # PopTorch's limit; more IPUs need more instances


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
            divisors = [str(count) for count in range(1, total + 1) if total % count == 0]
            raise ConfigError(
                f"{counted(total, 'replica')} cannot be divided equally between {instances} instances; "
                f"--num-instances can be {', '.join(divisors)}"
            )
        if self.local_ipus > IPUS_PER_PROCESS:
            raise ConfigError(
                f"one instance would use {counted(self.local_replicas, 'replica')} x {counted(ipus, 'IPU')} = "
                f"{self.local_ipus} IPUs, and a process can use {IPUS_PER_PROCESS}; use "
                f"--num-instances {-(-self.total_ipus // IPUS_PER_PROCESS)} or more"
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
    """One instance: its host, its replicas and its threads."""

    index: int
    host: str
    host_index: int
    local_index: int  # among the instances of its host
    replica_offset: int
    local_replicas: int
    threads_per_replica: int


@dataclasses.dataclass(frozen=True)
class Placement:
    """The instances of a run in host order, the same number on every host that is used."""

    cluster: Cluster
    sizes: Sizes
    instances: Tuple[InstanceSpec, ...]

    @property
    def hosts(self) -> Tuple[Host, ...]:
        """The hosts that have instances, in order."""
        return self.cluster.hosts[: self.instances[-1].host_index + 1]

    @property
    def binds_numa(self) -> bool:
        """Whether instances are bound to NUMA nodes: the cluster file requests it, and a host has several instances."""
        return self.cluster.numa and self.instances[-1].local_index > 0

    @property
    def cpus_per_host(self) -> Optional[int]:
        """The CPUs of a host, without those of this host that this process may not use; None if unknown."""
        return _known_cpus(self.cluster, self.hosts[0])

    @property
    def oversubscription(self) -> str:
        """Why the instances of a host together run more threads than it has CPUs, and what to do; "" if not."""
        per_host, threads = len(self.instances_on(0)), self.instances[0].threads_per_replica
        cpus = self.cpus_per_host
        if cpus is None or per_host * threads <= cpus:
            return ""
        ways = [f"at most {counted(cpus // threads, 'instance')} per host"] if cpus >= threads else []
        ways += [f"--threads-per-replica {cpus // per_host}"] if cpus >= per_host else []
        running = f"{per_host} x {threads} threads (instances x threads per replica)"
        return f"{running} share the {cpus} CPUs of a host: use {' or '.join(ways) or 'fewer of both'}"

    def instances_on(self, host_index: int) -> List[InstanceSpec]:
        per_host = self.instances[-1].local_index + 1
        return list(self.instances[host_index * per_host : (host_index + 1) * per_host])

    def ipus_on(self, host_index: int) -> int:
        """Return the number of IPUs that the instances of one host use."""
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
            f"{sizes.num_instances} instances cannot be divided equally between the {num_hosts} hosts of {cluster.name}"
            + hint(cluster, sizes.total_replicas, sizes.num_instances, sizes.ipus_per_replica)
        )
    specs = []
    for index in range(sizes.num_instances):
        host_index, local_index = divmod(index, per_host)
        host = cluster.hosts[host_index]
        cores = _known_cpus(cluster, host) or os.cpu_count() or 1
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
    _check_hosts(placement, per_host)
    return placement


def specs_of(sizes: Sizes, hosts: Sequence[str]) -> Tuple[InstanceSpec, ...]:
    """Return the instances on hosts, which are those of each instance, without their threads (0)."""
    local = sizes.local_replicas
    before: Dict[str, int] = {}  # instances of each host so far
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    found = []
    for index, host in enumerate(hosts):
        found.append(InstanceSpec(index, host, numbers[host], before.get(host, 0), index * local, local, 0))
        before[host] = before.get(host, 0) + 1
    return tuple(found)


def _known_cpus(cluster: Cluster, host: Host) -> Optional[int]:
    """Return the CPUs that instances can use on a host; None if only the host knows."""
    return len(os.sched_getaffinity(0)) if cluster.is_local else host.cpus


def _check_hosts(placement: Placement, per_host: int) -> None:
    for host_index, host in enumerate(placement.hosts):
        if host.slots is not None and per_host > host.slots:
            raise ConfigError(
                f"host {host.name} of {placement.cluster.name} is listed with slots={host.slots} and would get "
                f"{counted(per_host, 'instance')}; use fewer instances or more hosts"
            )
        needed = placement.ipus_on(host_index)
        if host.ipus is not None and needed > host.ipus:
            raise ClusterError(
                f"host {host.name} of {placement.cluster.name} has {counted(host.ipus, 'IPU')} and the plan "
                f"puts {needed} on it ({counted(placement.sizes.total_ipus, 'IPU')} on "
                f"{counted(len(placement.hosts), 'host')}); use fewer replicas or more hosts"
            )


def check_ilds(placement: Placement, num_ilds: Optional[int]) -> None:
    """Raise ConfigError if instances cannot be divided equally between IPU-Link domains."""
    if num_ilds and placement.sizes.num_instances % num_ilds:
        raise ConfigError(
            f"{placement.sizes.num_instances} instances cannot be divided equally between {num_ilds} IPU-Link domains; "
            f"--num-instances can be a multiple of {num_ilds}"
        )


def link_domain_index(spec: InstanceSpec, placement: Placement, link_domains: int) -> int:
    """Return the IPU-Link domain of an instance: equal blocks of consecutive instances.

    Inferred: the SDK's documentation does not state the order.
    """
    return spec.index * link_domains // placement.sizes.num_instances


def gcd_index(spec: InstanceSpec, gcds: int) -> int:
    """Return the graph compile domain (GCD) of an instance: its own, or 0 if the partition has one (reconfigurable)."""
    return spec.index if gcds > 1 else 0


def num_gcds(partition: VipuPartition, placement: Placement) -> int:
    """Return the number of graph compile domains: that of the cluster file, else one per instance."""
    return partition.gcds or placement.sizes.num_instances


def device_id(spec: InstanceSpec, placement: Placement) -> Optional[int]:
    """Return the id of the multi-IPU device of an instance, or None if its number of IPUs is not a power of two.

    Inferred from one known case, in which 8 replicas of 2 IPUs in 4 instances use the ids 24 to 27: a system of T IPUs
    (T rounded up to a power of two) has T single devices first, then T/2 pairs, T/4 quadruples, and so on.
    """
    ipus = placement.sizes.local_ipus
    if ipus & (ipus - 1):
        return None
    system = 1 << (placement.sizes.total_ipus - 1).bit_length()
    return 2 * (system - system // ipus) + spec.index


def partition_conflict(partition: VipuPartition, placement: Placement) -> Optional[str]:
    """Return why a placement cannot use a partition, and what to do; None if it can."""
    gcds, instances = num_gcds(partition, placement), placement.sizes.num_instances
    if gcds not in (1, instances):
        return (
            f"partition {partition.partition} has {counted(gcds, 'GCD')} and the run "
            f"{counted(instances, 'instance')}, which need one each: "
            f"use --num-instances {gcds}, or a partition with {instances} GCDs"
        )
    if partition.size is not None and partition.size < placement.sizes.total_ipus:
        return (
            f"partition {partition.partition} has {counted(partition.size, 'IPU')} and the run needs "
            f"{placement.sizes.total_ipus}"
        )
    return None


def is_power_of_two(number: int) -> bool:
    """Return whether a positive number is a power of two."""
    return number & (number - 1) == 0


def fits(cluster: Cluster, replicas: int, instances: int, ipus_per_replica: int) -> bool:
    """Return whether the replicas can run in so many instances, without IPUs if `ipus_per_replica` is 0."""
    num_hosts = min(len(cluster.hosts), instances)
    if replicas % instances or instances % num_hosts:
        return False
    per_host, local_ipus = instances // num_hosts, replicas // instances * ipus_per_replica
    if local_ipus and (local_ipus > IPUS_PER_PROCESS or not is_power_of_two(local_ipus)):
        return False
    return all(
        (host.slots is None or per_host <= host.slots) and (host.ipus is None or per_host * local_ipus <= host.ipus)
        for host in cluster.hosts[:num_hosts]
    )


def hint(cluster: Cluster, replicas: int, instances: int, ipus_per_replica: int) -> str:
    """Return the end of a message about numbers that do not fit: those that do; "" if there are none."""
    counts = [each for each in range(1, replicas + 1) if fits(cluster, replicas, each, ipus_per_replica)]
    if counts:
        return f"; --num-instances can be {', '.join(map(str, counts))}"
    fewer = range(replicas - replicas % instances, 0, -instances)
    found = next((each for each in fewer if fits(cluster, each, instances, ipus_per_replica)), None)
    return f"; use --replicas {found}" if found else ""
