"""What a plan feeds, for comparisons of placements."""

from __future__ import annotations

from typing import Any, List

import torch

from raypod.training.data.feed import Feed
from raypod.training.tasks.registry import task_of_plan


def fed(plan: Any) -> List[torch.Tensor]:
    """Return everything that is fed in each update, of all instances in turn."""
    feeds = [Feed(plan, each, task_of_plan(plan).load()) for each in plan.placement.instances]
    try:
        streams = [[batch for segment in plan.segments() for batch in feed.calls(segment)] for feed in feeds]
    finally:
        for feed in feeds:
            feed.close()
    return [torch.cat([each.double().reshape(-1) for each in column]) for row in zip(*streams) for column in zip(*row)]


def equal(ours: List[torch.Tensor], theirs: List[torch.Tensor]) -> bool:
    """Return whether two plans feed the same."""
    return len(ours) == len(theirs) and all(torch.equal(*pair) for pair in zip(ours, theirs))
