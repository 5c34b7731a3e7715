"""Where an instance sits in the partition of a pod: its IPU-Link domain, its GCD, its device (contract sections 6, 9).

Numbers for the plan and for the environment of an instance; nothing here asks a device. [I] marks what is inferred.
"""

from __future__ import annotations

from typing import Optional

from raypod.cluster import VipuPartition
from raypod.placement import InstanceSpec, Placement


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
