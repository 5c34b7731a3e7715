"""Where the instances of a run sit: replicas over instances over hosts. Never part of the arithmetic of a run.

What a launcher and a trainer have in common: it knows replicas and IPUs, and nothing of batches, models or data.
"""

from __future__ import annotations

import dataclasses
import os
from typing import List, Tuple

from raypod.cluster import Cluster, Host
from raypod.errors import ClusterError, ConfigError

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
