"""Choose the fleet of a plan."""

from __future__ import annotations

from typing import Callable

from raypod.fleet.base import Fleet
from raypod.plan.plan import Plan


def fleet_for(plan: Plan, log: Callable[[str], None]) -> Fleet:
    """Return the fleet that `run.fleet` names. `log` receives lines for the user.

    Only that fleet is imported: the inline one works without Ray.
    """
    if plan.config.run.fleet == "inline":
        from raypod.fleet.inline import InlineFleet

        return InlineFleet(plan)
    from raypod.fleet.ray import RayFleet

    return RayFleet(plan, log)
