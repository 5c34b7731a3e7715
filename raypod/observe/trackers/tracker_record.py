"""What a tracker's process remembers in the run folder: `trackers/<name>.json`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Optional

from raypod.observe.trackers.tracker import Steps
from raypod.plan.layout import TRACKERS
from raypod.system.files import make_folder, parse_json, replace_file


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


def path_of(run_dir: Path, tracker: str) -> Path:
    """Return the file of a tracker."""
    return run_dir / TRACKERS / f"{file_name(tracker)}.json"


def file_name(tracker: str) -> str:
    """Return the name of a tracker as a part of a file name."""
    return tracker.replace(":", ".")


def read(path: Path) -> TrackerRecord:
    """Return the content of the file; that of a new tracker without a readable one."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return TrackerRecord(**parse_json(path.read_text()))
    return TrackerRecord()


def write(path: Path, memory: TrackerRecord) -> None:
    """Replace the file. OSError if it cannot be written."""
    make_folder(path.parent)
    replace_file(path, (json.dumps(dataclasses.asdict(memory)) + "\n").encode())
