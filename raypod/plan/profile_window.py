"""The updates that `--profile` records, as whole calls."""

from __future__ import annotations

from typing import Optional

from raypod.errors import ConfigError
from raypod.plan.plan import Plan
from raypod.plan.values import parse_updates
from raypod.system.command_line import counted


def window_of(plan: Plan) -> Optional[range]:
    """Return the 0-based updates of the calls that contain the updates of `--profile`; None without a profile.

    Raises:
        ConfigError: the run has fewer updates.
    """
    text = plan.config.run.profile
    if text is None:
        return None
    first, last = parse_updates(text)
    if last > plan.total_updates:
        raise ConfigError(
            f"--profile {text}: the run has {counted(plan.total_updates, 'update')}; choose a range within them"
        )
    in_call = plan.geometry.device_iterations
    return range((first - 1) // in_call * in_call, -(-last // in_call) * in_call)


def rounding_of(plan: Plan) -> Optional[str]:
    """Return a line for the user if the window of `--profile` contains more updates than requested."""
    window = window_of(plan)
    if window is None or parse_updates(str(plan.config.run.profile)) == (window.start + 1, window.stop):
        return None
    return (
        f"--profile {plan.config.run.profile} records the updates {window.start + 1}-{window.stop}: whole calls of "
        f"{counted(plan.geometry.device_iterations, 'update')}"
    )
