"""The environment variables of an instance's process, which are set before torch and the SDK are imported."""

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
from raypod.plan.placement import InstanceSpec
from raypod.plan.plan import Plan
from raypod.system.emulated import activation


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
        # Host collectives and gradient exchanges use the coordinator's timeout.
        timeout_s=plan.config.run.report_timeout_s,
        emulated_horovod=plan.config.run.collectives == "gloo",
    )
    return {**env, **of_sdk, activation.COMPILE: str(int(activation.requests_compilation()))}
