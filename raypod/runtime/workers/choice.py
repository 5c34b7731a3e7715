"""Choose the fleet of a plan."""

from __future__ import annotations

import dataclasses
import threading
from typing import Callable

from raypod.errors import ClusterError
from raypod.plan.compatibility import asks_for_ray
from raypod.plan.plan import Plan
from raypod.runtime.workers.fleet import Fleet
from raypod.system.sdk import may_hold_interpreter_lock


def with_fleet(plan: Plan) -> Plan:
    """Return a plan of `--fleet auto` for this process: inline if nothing needs Ray. Others stay as they are.

    Ray is needed for several instances, a cluster, and what `asks_for_ray`. It is needed on IPUs, whose SDK holds the
    interpreter lock during a call or a compilation: the heartbeat of the run's lease would stop in its process. In a
    thread beside the main one, other trainings may run in this process, whose environment and random numbers an inline
    one would change.
    """
    config = plan.config
    is_alone = plan.geometry.num_instances == 1 and plan.placement.cluster.is_local
    if config.run.fleet != "auto" or not is_alone or asks_for_ray(config):
        return plan
    if may_hold_interpreter_lock(config.run.device):
        return plan
    if threading.current_thread() is not threading.main_thread() or _is_on_a_cluster():
        return plan
    return dataclasses.replace(plan, is_inline=True)


def _is_on_a_cluster() -> bool:
    """Return whether this process uses a Ray cluster, or one runs on this host that a run would join."""
    from raypod.runtime.workers.ray_session import is_connected, running_cluster  # not needed by most plans

    try:
        return is_connected() or running_cluster(None) is not None
    except ClusterError:  # RAY_ADDRESS is no address, which the start of the run reports
        return True


def fleet_for(plan: Plan, log: Callable[[str], None]) -> Fleet:
    """Return the fleet of a plan. `log` receives lines for the user.

    Only that fleet is imported: the inline one works without Ray.
    """
    if plan.is_inline:
        from raypod.runtime.workers.inline import InlineFleet

        return InlineFleet(plan)
    from raypod.runtime.workers.ray import RayFleet

    return RayFleet(plan, log)
