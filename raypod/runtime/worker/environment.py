"""The environment variables and the cores of an instance's process, set before torch and the SDK are imported."""

from __future__ import annotations

import os
from typing import Dict

from raypod.plan.environment import (
    STARTUP_DIR,
    cache_environment,
    device_environment,
    join_path,
    placement_environment,
)
from raypod.plan.ipu_options import profile_environment
from raypod.plan.placement import InstanceSpec, Placement
from raypod.plan.plan import Plan
from raypod.system import cores
from raypod.system.process import bind_process
from raypod.system.sdk import activation

_COORDINATOR_FIRST_S = 10.0  # longer than heartbeats take on a busy host


def instance_environment(plan: Plan, spec: InstanceSpec, python_path: str = "") -> Dict[str, str]:
    """Return the variables of one instance of a training run, except those that depend on the running host.

    `python_path` is the inherited PYTHONPATH.
    """
    env = {**placement_environment(plan.placement, spec), **device_environment(plan.placement, spec)}
    # Set for child processes as well: the sitecustomize.py in STARTUP_DIR makes torchvision importable.
    env["PYTHONPATH"] = join_path(STARTUP_DIR, python_path)
    env.update(cache_environment(plan.config.pod.executable_cache_path))
    env.update(profile_environment(plan.config, spec.index, os.environ.get("POPLAR_ENGINE_OPTIONS", "")))
    of_sdk = activation.settings(
        strict=plan.config.run.strict,
        memory_format=plan.config.training.memory_format,
        # After the coordinator's timeout of an endless call: if the others give up first, they seem to be stuck, too.
        timeout_s=plan.config.run.report_timeout_s + _COORDINATOR_FIRST_S,
        emulated_horovod=plan.config.run.collectives == "gloo",
    )
    return {**env, **of_sdk, activation.COMPILE: str(int(activation.requests_compilation()))}


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
