"""What the process of an instance needs in its environment: a pure function of the plan.

Written before the SDK (and torch) is imported there. The POPDIST_* names are those of a poprun instance (poptorch
contract section 6.3); nothing else in raypod writes environment variables for instances.
"""

from __future__ import annotations

from pathlib import Path
from typing import Dict

from raypod.plan import InstanceSpec, Plan

STARTUP_DIR = str(Path(__file__).parent / "startup")


def instance_environment(plan: Plan, spec: InstanceSpec, python_path: str = "") -> Dict[str, str]:
    """The variables of one instance. What is known only once its host runs (addresses) is added by the fleet.

    `python_path` is the PYTHONPATH it would otherwise inherit.
    """
    geometry = plan.geometry
    env = {
        # For the processes that the instance itself starts: lets torchvision load in them too.
        "PYTHONPATH": ":".join(filter(None, [STARTUP_DIR, python_path])),
        "POPDIST_NUM_TOTAL_REPLICAS": str(geometry.total_replicas),
        "POPDIST_NUM_LOCAL_REPLICAS": str(spec.local_replicas),
        "POPDIST_NUM_IPUS_PER_REPLICA": str(geometry.ipus_per_replica),
        "POPDIST_REPLICA_INDEX_OFFSET": str(spec.replica_offset),
        "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
        "POPDIST_LOCAL_INSTANCE_INDEX": str(spec.local_index),
        # Forked loader workers hang on a pod without it (contract section 13, trap 35).
        "RDMAV_FORK_SAFE": "1",
        # Always explicit: Ray and `ray up` put OMP_NUM_THREADS=1 into what they start, torch's own default is every
        # core in every instance, and the rounding of a reduction depends on the count.
        "OMP_NUM_THREADS": str(spec.threads_per_replica),
        "MKL_NUM_THREADS": str(spec.threads_per_replica),
    }
    # The bound of every host collective and gradient exchange: the one by which the coordinator gives up as well.
    env["EMULATED_POD_TIMEOUT_S"] = str(plan.config.run.report_timeout_s)
    env.update(_horovod_identity(plan, spec))
    cache = plan.config.pod.executable_cache_path
    if cache is not None:
        env["POPTORCH_CACHE_DIR"] = env["POPDIST_EXECUTABLE_CACHE_PATH"] = cache
    if plan.config.run.collectives == "gloo":
        env["EMULATED_POD_HOROVOD"] = "emulated"
    return env


def _horovod_identity(plan: Plan, spec: InstanceSpec) -> Dict[str, str]:
    """Who an instance is to Horovod: its ranks are instances, not replicas (contract section 13, trap 39)."""
    return {
        "HOROVOD_HOSTNAME": spec.host,
        "HOROVOD_RANK": str(spec.index),
        "HOROVOD_SIZE": str(plan.geometry.num_instances),
        "HOROVOD_LOCAL_RANK": str(spec.local_index),
        "HOROVOD_LOCAL_SIZE": str(len(plan.instances_on(spec.host_index))),
        "HOROVOD_CROSS_RANK": str(spec.host_index),
        "HOROVOD_CROSS_SIZE": str(len(plan.hosts)),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
