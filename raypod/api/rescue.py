"""The end of a run whose run folder no longer takes its state: the newest one goes to `--storage-path` and to copies.

The coordinator saves it in a folder on another disk of this host (`runtime/coordinator/kept_state.py`). Here that gets
the files with which a run continues, and is passed on while the instances still run.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Callable, List, Optional, Sequence

from raypod.errors import RaypodError
from raypod.events import CheckpointSaved, Event
from raypod.plan import layout
from raypod.plan.plan import Plan
from raypod.runs import run_folder
from raypod.runs.callback import Callback
from raypod.runs.upload.mirror import Mirror
from raypod.runtime.coordinator.checkpoint_copies import CheckpointCopies
from raypod.runtime.coordinator.kept_state import Elsewhere
from raypod.system.command_line import shortened
from raypod.system.files import replace_file, strict_json


class Rescue(Callback):
    """Passes the newest state of a run on; in place of `copies`. The `callbacks` write the files of the run folder."""

    def __init__(
        self,
        plan: Plan,
        elsewhere: Elsewhere,
        mirror: Mirror,
        copies: CheckpointCopies,
        warn: Callable[[str], None],
        callbacks: Sequence[Callback],
    ) -> None:
        self._plan, self._elsewhere, self._mirror, self._copies = plan, elsewhere, mirror, copies
        self._warn, self._callbacks = warn, callbacks

    def on_event(self, event: Event) -> None:
        """Keep copies of each checkpoint; pass on the one that is not in the run folder."""
        if not isinstance(event, CheckpointSaved) or not self._elsewhere.holds(event.path):
            self._copies.on_event(event)
            return
        folder = self._elsewhere.folder()
        try:
            self._write_files(folder)
        except (OSError, RaypodError) as error:
            self._warn(f"{folder} lacks files of the run: {error}")
        hosts = self._copies.send_from(folder, Path(event.path))
        url = self._mirror.send_from(folder)
        self._elsewhere.way_on = self._way_on(event.update, url, hosts, folder)
        if url or hosts:
            self._elsewhere.remove()

    def _write_files(self, folder: Path) -> None:
        run_folder.create(dataclasses.replace(self._plan, run_dir=str(folder)))
        for each in reversed(self._callbacks):
            each.copy_to(folder)
        run_id: Optional[str] = self._copies.run_id
        if run_id:
            replace_file(folder / layout.COPIES, (strict_json({"run_id": run_id}) + "\n").encode())

    def _way_on(self, update: int, url: str, hosts: List[str], folder: Path) -> str:
        run_dir = self._plan.run_dir
        if url:
            return (
                f"the state of update {update} is saved: continue on another disk with --resume {url} --run-dir FOLDER"
            )
        if hosts:
            return (
                f"the state of update {update} is saved on host {shortened(hosts)}: once the disk is back, `raypod up "
                f"--no-restart FILE` brings it to {run_dir}; then continue with --resume {run_dir}"
            )
        return f"the state of update {update} is saved: continue with --resume {folder}"
