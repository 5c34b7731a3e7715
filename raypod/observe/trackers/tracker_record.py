"""What a tracker's process remembers in the run folder: `trackers/<name>.json`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Optional

from raypod.observe.trackers.tracker import Steps
from raypod.plan.layout import TRACKERS
from raypod.system.companion import read_state


@dataclasses.dataclass(frozen=True)
class TrackerRecord:
    """The run of the tracker, and what it has recorded. It holds no address and no secret."""

    run_id: Optional[str] = None
    training: int = -1  # the newest update whose metrics are recorded
    test: int = -1  # the newest update whose evaluation is recorded
    error: str = ""  # why the tracker fails at the moment
    is_complete: bool = False  # everything is recorded, and the run of the tracker has ended
    media: int = -1  # the newest update whose pictures and texts are recorded

    @property
    def steps(self) -> Steps:
        """The newest recorded steps."""
        return Steps(self.training, self.test, self.media)

    def at_start(self) -> TrackerRecord:
        """See `companion.State`."""
        return dataclasses.replace(self, error="", is_complete=False)


def path_of(run_dir: Path, tracker: str) -> Path:
    """Return the file of a tracker."""
    return run_dir / TRACKERS / f"{file_name(tracker)}.json"


def file_name(tracker: str) -> str:
    """Return the name of a tracker as a part of a file name."""
    return tracker.replace(":", ".")


def read(path: Path) -> TrackerRecord:
    """Return the content of the file; that of a new tracker without a readable one."""
    return read_state(path, TrackerRecord())
