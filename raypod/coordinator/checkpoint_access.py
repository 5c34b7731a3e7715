"""Let instances load and write the checkpoints of the coordinator's host, whether they share a disk with it or not."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Callable, Optional, Tuple

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
    call = functools.partial(fleet.call_on, (root,))
    return write_from_host(
        *(fleet, run_dir),
        has_file=lambda path: call("has_file", path)[root],
        write=lambda server: call("save_kept", manifest, server)[root],
    )


def write_from_host(
    fleet: Fleet,
    run_dir: str,
    has_file: Callable[[str], bool],
    write: Callable[[Optional[Server]], Tuple[SaveReport, ...]],
) -> Tuple[SaveReport, ...]:
    """Write a checkpoint of a process on any host into the run folder of this one.

    `has_file` returns whether that host has a file; `write` writes there, or through the server that it gets.
    """
    checkpoints = storage.checkpoints_folder(run_dir)
    with storage.unique_file(checkpoints) as path:
        has_folder = path is not None and has_file(str(path))
    return write(None) if has_folder else _write_through_server(fleet, checkpoints, write)


def write_kept_into(fleet: Fleet, root: int, manifest: Manifest, folder: Path) -> Tuple[SaveReport, ...]:
    """As `write_kept`, into any folder of this host."""
    call = functools.partial(fleet.call_on, (root,), "save_kept", manifest)
    return _write_through_server(fleet, storage.checkpoints_folder(folder), lambda server: call(server)[root])


def _write_through_server(
    fleet: Fleet, checkpoints: Path, write: Callable[[Optional[Server]], Tuple[SaveReport, ...]]
) -> Tuple[SaveReport, ...]:
    with contextlib.closing(fleet.serve(CheckpointReceiver, str(checkpoints))) as server:
        return write(server)
