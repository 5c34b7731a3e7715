"""Give the process of an instance its share of the cores of its host."""

from __future__ import annotations

import os

from raypod.plan.placement import InstanceSpec, Placement
from raypod.system import cores
from raypod.system.emulated import activation
from raypod.system.process import bind_process


def take_cores(placement: Placement, spec: InstanceSpec) -> None:
    """Bind this process to the cores of an instance, if the placement binds, and set variables of the emulated SDK.

    They say how many replicas compute at the same time, so that the instances of a host together do not run more
    threads than it has CPUs, or, if the placement binds, on which CPUs they do. No result depends on them: the number
    of threads within a replica stays that of the plan.
    """
    found = cores.usable_cores()
    mine = cores.divide(found, len(placement.instances_on(spec.host_index)))[spec.local_index]
    cpus = cores.replica_cpus(mine, spec.local_replicas, spec.threads_per_replica)
    if placement.cluster.numa:
        if mine != found:
            bind_process(cores.cpus_of(mine))
        os.environ.update(activation.settings(replica_cpus=cpus))
    else:
        for name, value in activation.settings(replicas_at_a_time=len(cpus)).items():
            os.environ.setdefault(name, value)
