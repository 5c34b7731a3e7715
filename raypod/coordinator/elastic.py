"""Changes of the number of replicas of a run, with equal samples in every update."""

from __future__ import annotations

from typing import Optional, Sequence

from raypod.checkpoint.format import Checkpoint
from raypod.events import Resized
from raypod.plan.elastic import sizes_of
from raypod.plan.plan import Plan


def resize_on_resume(plan: Plan, checkpoint: Optional[Checkpoint], hosts: Sequence[str]) -> Optional[Resized]:
    """Return how the sizes of a plan differ from those with which its checkpoint was written; None if they do not."""
    if checkpoint is None:
        return None
    geometry = checkpoint.manifest.geometry
    return resized(plan, geometry["total_replicas"], checkpoint.update, hosts, f"resumed from {checkpoint.path.name}")


def resized(plan: Plan, before: int, update: int, hosts: Sequence[str], cause: str) -> Optional[Resized]:
    """Return the event for a plan that follows on one of `before` replicas; None if the number is the same."""
    sizes = sizes_of(plan)
    return None if sizes[0] == before else Resized(update, *sizes, before, tuple(hosts), cause)
