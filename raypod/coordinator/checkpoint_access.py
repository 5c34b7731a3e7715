"""Let instances load and write the checkpoints of the coordinator's host, whether they share a disk with it or not."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Optional, Tuple

from raypod.checkpoint import storage
from raypod.checkpoint.format import Checkpoint, Manifest
from raypod.checkpoint.transfer import CheckpointFiles, CheckpointReceiver, Server
from raypod.events import SaveReport
from raypod.fleet.base import Fleet


def load_on(fleet: Fleet, root: int, checkpoint: Checkpoint) -> None:
    """Load a checkpoint of this host in instance `root`.

    Raises:
        CheckpointDamaged: its files differ from their records, or are no checkpoint files.
    """
    arguments = (root, checkpoint, storage.identity(checkpoint.path))
    if not fleet.call("load_checkpoint", *arguments)[root]:
        with contextlib.closing(fleet.serve(CheckpointFiles, str(checkpoint.path))) as server:
            fleet.call("load_checkpoint", *arguments, server)


def write_here(fleet: Fleet, run_dir: str) -> Optional[Server]:
    """Make a new instance 0 write its checkpoints into the run folder of this host.

    Returns the server that receives them; None if the instance has the same folder, on this host or a shared disk.
    """
    checkpoints = storage.checkpoints_folder(run_dir)
    with storage.unique_file(checkpoints) as path:
        if path is not None and fleet.call("has_file", str(path))[0]:
            return None
    server = fleet.serve(CheckpointReceiver, str(checkpoints))
    fleet.call("send_checkpoints_to", server)
    return server


def write_kept(fleet: Fleet, root: int, manifest: Manifest, run_dir: str) -> Tuple[SaveReport, ...]:
    """Write the state that instance `root` has kept after `release` into the run folder of this host."""
    checkpoints = storage.checkpoints_folder(run_dir)
    with storage.unique_file(checkpoints) as path:
        has_folder = path is not None and fleet.call_on((root,), "has_file", str(path))[root]
    if has_folder:
        return _saved_by(fleet, root, manifest, None)
    return write_kept_into(fleet, root, manifest, Path(run_dir))


def write_kept_into(fleet: Fleet, root: int, manifest: Manifest, folder: Path) -> Tuple[SaveReport, ...]:
    """As `write_kept`, into any folder of this host."""
    with contextlib.closing(fleet.serve(CheckpointReceiver, str(storage.checkpoints_folder(folder)))) as server:
        return _saved_by(fleet, root, manifest, server)


def _saved_by(fleet: Fleet, root: int, manifest: Manifest, server: Optional[Server]) -> Tuple[SaveReport, ...]:
    reports: Tuple[SaveReport, ...] = fleet.call_on((root,), "save_kept", manifest, server)[root]
    return reports
