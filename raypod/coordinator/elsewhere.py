"""A folder on another disk of this host, for the newest state of a run whose run folder cannot take it any more.

It has what a run folder has, and is passed on to the places that keep the run besides its folder: `api/rescue.py`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Optional

from raypod.errors import CheckpointNotSaved, FolderLost, RaypodError
from raypod.plan.plan import Plan

_OTHER_DISKS = ("/var/tmp", "/dev/shm")  # besides the temporary folder, if that is on the disk of the run folder


class Elsewhere:
    """The other folder of one run; it is created when it is needed.

    Attributes:
        is_wanted: the run has another place, `--storage-path` or `--checkpoint-copies`.
        way_on: where the state is and how the run continues from there, for a message; "" if it is nowhere.
    """

    def __init__(self, plan: Plan) -> None:
        run = plan.config.run
        self.is_wanted, self.way_on = run.storage_path is not None or run.checkpoint_copies > 1, ""
        self._name, self._folder = Path(plan.run_dir).resolve().name, None  # type: str, Optional[Path]
        self._device = _device(Path(plan.run_dir))

    def is_for(self, error: RaypodError) -> bool:
        """Return whether a run that ends by an error has a state that only its run folder does not take."""
        return self.is_wanted and isinstance(error, (CheckpointNotSaved, FolderLost))

    def folder(self) -> Path:
        """Return the folder, with the name of the run folder, which a mirror needs. OSError if it cannot be created."""
        if self._folder is None:
            folder = Path(tempfile.mkdtemp(prefix="raypod-state-", dir=self._parent()), self._name)
            folder.mkdir()
            self._folder = folder
        return self._folder

    def holds(self, path: str) -> bool:
        """Return whether a checkpoint is in the folder."""
        return self._folder is not None and self._folder in Path(path).parents

    def remove(self) -> None:
        """Remove the folder."""
        if self._folder is not None:
            shutil.rmtree(str(self._folder.parent), ignore_errors=True)

    def named(self, error: RaypodError) -> RaypodError:
        """Return the error with the way on, if there is one."""
        if self.way_on and isinstance(error, CheckpointNotSaved):
            return CheckpointNotSaved(error.path, error.cause, self.way_on)
        if self.way_on and isinstance(error, FolderLost):
            return FolderLost(error.folder, self.way_on)
        return error

    def _parent(self) -> str:
        candidates = (tempfile.gettempdir(), *_OTHER_DISKS)
        others = (each for each in candidates if _device(Path(each)) not in (None, self._device))
        return next((each for each in others if os.access(each, os.W_OK)), candidates[0])


def _device(path: Path) -> Optional[int]:
    with contextlib.suppress(OSError):
        return path.stat().st_dev
    return None
