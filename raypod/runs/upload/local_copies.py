"""Local copies of runs on a remote storage, for commands that read a run: the small files, and manifests.

The tensors of a checkpoint are copied when a command needs them. The copies are removed when the process ends.
"""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Dict, NamedTuple, Optional, Union

from raypod.errors import CheckpointDamaged, ConfigError
from raypod.plan import layout, resolve
from raypod.runs.upload.remote_run import RemoteRun
from raypod.system.command_line import show
from raypod.system.urls import is_url
from raypod.training.checkpoint import storage

_WANTED = (*layout.names("resume"), layout.SUMMARY)


class Snapshot(NamedTuple):
    """A copy of a run: its folder has the name of the run. `run_id` is None if it is not known."""

    run: RemoteRun
    folder: Path
    run_id: Optional[str]


_snapshots: Dict[str, Snapshot] = {}  # by folder


def take(url: str, setting: str) -> Snapshot:
    """Copy the small files and the manifests of a run, or the manifest of one checkpoint, and warn about damages.

    Raises:
        ConfigError: there is no such run, or the URL cannot be used.
        RunError: the storage cannot be reached.
    """
    run = RemoteRun(url, setting)
    parent = Path(tempfile.mkdtemp(prefix="raypod-remote-"))
    atexit.register(shutil.rmtree, str(parent), ignore_errors=True)
    folder = parent / run.url.name
    folder.mkdir()
    messages = run.fetch_manifests(folder)
    checkpoints, damaged = storage.list_checkpoints(storage.checkpoints_folder(folder))
    if run.url.checkpoint is not None and not checkpoints and not damaged:
        raise run.missing()
    found, more = run.fetch_files(folder, lambda name: name in _WANTED)
    if found is None and not checkpoints:
        raise run.missing()
    run.close()
    for message in [*messages, *more]:
        show(f"raypod: warning: {message}", sys.stderr)
    snapshot = Snapshot(run, folder, found.run_id if found else None)
    _snapshots[str(folder)] = snapshot
    return snapshot


def take_resumed(resume: Optional[str]) -> None:
    """Copy the run that `--resume` names, if that is a URL: `resolve.run_folder_of` returns the copy from then on."""
    if resume is not None and is_url(resume):
        snapshot = take(resume, "--resume")
        resolve.remote_runs[resume.rstrip("/")] = snapshot.folder


def of_resume(resume: str) -> Snapshot:
    """Return the copy that `take_resumed` has made."""
    return _snapshots[str(resolve.remote_runs[resume])]


def local_folder(where: Union[str, Path], setting: str) -> Path:
    """Return the path of a run or checkpoint; for a URL that of a copy. Errors are those of `take`."""
    text = str(where)
    if not is_url(text):
        return Path(where)
    snapshot = take(text, setting)
    name = snapshot.run.url.checkpoint
    return snapshot.folder if name is None else storage.checkpoints_folder(snapshot.folder) / name


def is_copy(folder: Path) -> bool:
    """Return whether a run folder is a copy of a remote one."""
    return str(folder) in _snapshots


def shown(path: Path) -> str:
    """Return a path; in a copy the URL of what it is a copy of."""
    for folder, snapshot in _snapshots.items():
        if Path(folder) in path.parents:
            return f"{snapshot.run.url.run}/{path.relative_to(folder).as_posix()}"
    return str(path)


def complete(checkpoint: Path) -> None:
    """Copy the tensors of a checkpoint of a copy, and verify them. Does nothing for any other path.

    Raises:
        ConfigError: the checkpoint is damaged.
    """
    snapshot = _snapshots.get(str(checkpoint.parent.parent))
    if snapshot is None:
        return
    try:
        snapshot.run.fetch_checkpoint(storage.read_manifest(checkpoint), checkpoint)
    except CheckpointDamaged as error:
        raise ConfigError(str(error)) from None
    finally:
        snapshot.run.close()
