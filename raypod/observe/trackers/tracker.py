"""What a tracker is: the interface that `--tracker module:Class` implements."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

from typing_extensions import Protocol

# How the run ended; "killed" if its coordinator could not report it.
FINISHED, FAILED, INTERRUPTED, KILLED = "finished", "failed", "interrupted", "killed"


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """What a tracker needs to know about a run when it begins."""

    name: str  # of the run folder
    folder: Path
    parameters: Dict[str, str]  # the config, by section.key


class Point(NamedTuple):
    """Values that were measured after `step` updates: `training/loss`, `test/accuracy`, ..."""

    step: int
    unix_s: float
    values: Dict[str, float]


class Steps(NamedTuple):
    """The newest steps that a tracker has recorded, -1 for none: of `training/...` and of `test/...`."""

    training: int
    test: int


class Tracker(Protocol):
    """A run of a tracker. Any method may raise; it is then opened again, and gets what it has not recorded yet."""

    def open(self, facts: RunFacts, run_id: Optional[str]) -> str:
        """Create a run of the tracker, or continue `run_id`; return its id."""

    def recorded(self) -> Optional[Steps]:
        """Return what the open run holds, if the tracker can tell: points up to there are not logged again."""

    def log(self, points: List[Point]) -> None:
        """Record points, in ascending order of steps."""

    def add_artifact(self, path: Path, name: str) -> None:
        """Record a file or a folder."""

    def close(self, end: str, facts: Dict[str, str]) -> None:
        """End the run of the tracker: `end` is one of the four constants. `facts` describes the result."""
