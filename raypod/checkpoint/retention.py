"""Which checkpoints are kept: the last few, and the one with the best test accuracy."""

from __future__ import annotations

from typing import List, Sequence

from raypod.checkpoint.manifest import Checkpoint


def superfluous(newest_first: Sequence[Checkpoint], keep: int) -> List[Checkpoint]:
    """Those of a run's checkpoints that need not be kept, the oldest first."""
    tested = [each for each in newest_first if each.manifest.test_accuracy is not None]
    best = max(tested, key=lambda each: each.manifest.test_accuracy or 0.0, default=None)  # the newest of equals
    return [each for each in reversed(newest_first[keep:]) if each is not best]
