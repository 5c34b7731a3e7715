"""What a tracker is: the interface that `--tracker module:Class` implements."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from typing_extensions import Protocol

from raypod.runs.media import LoggedMedia

# How the run ended; "killed" if its coordinator could not report it.
FINISHED, FAILED, INTERRUPTED, KILLED = "finished", "failed", "interrupted", "killed"


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """What a tracker needs to know about a run when it begins."""

    name: str  # of the run folder
    folder: Path
    parameters: Dict[str, str]  # the config, by section.key


class Point(NamedTuple):
    """Values that were measured after `step` updates: `training/loss`, `test/accuracy`, ...; or a picture or text."""

    step: int
    unix_s: float
    values: Dict[str, float]
    media: Optional[LoggedMedia] = None  # of `raypod.log_image` and `raypod.log_text`; then there are no values


class Steps(NamedTuple):
    """The newest steps that a tracker has recorded, -1 for none: of `training/...`, of `test/...` and of media."""

    training: int
    test: int
    media: int = -1


class Tracker(Protocol):
    """A run of a tracker. Any method may raise; it is then opened again, and gets what it has not recorded yet.

    A tracker can have two more methods; one without them gets no pictures and texts. An interrupted call is repeated.

        def log_image(self, name: str, path: Path, step: int) -> None: ...  # `path` is a PNG file
        def log_text(self, name: str, text: str, step: int) -> None: ...
    """

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


def log_points(tracker: Tracker, points: Sequence[Point]) -> None:
    """Pass points to a tracker in their order: values to `log`, pictures and texts to their methods, if it has them."""
    for media, group in itertools.groupby(points, lambda point: point.media):
        if media is None:
            tracker.log(list(group))
            continue
        log: Any = getattr(tracker, f"log_{media.kind}", None)
        if log is not None and media.path.is_file():
            log(media.name, media.path if media.kind == "image" else media.path.read_text("utf-8"), media.update)
