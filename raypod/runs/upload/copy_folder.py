"""Copies of a run's newest checkpoint on a host: how one is written, and which ones are there.

A copy is a small run folder: the checkpoint, and the files with which the run continues and proves its data. It has its
name only when it is complete. `run.json` lists its files with their SHA-256, which `pod/host_copies.py` verifies with
Python alone, on a host without raypod. Does not import torch.

    ~/.raypod/copies/RUN_ID/000001-00000100/        generation and update: they order the copies of a run
        run.json  config.yaml  plan.json  metrics.jsonl  ledger.jsonl  ...
        checkpoints/update-00000100/
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Collection, Dict, List, NamedTuple, Optional, Tuple

from raypod.plan.layout import CHECKPOINTS
from raypod.system import files
from raypod.system.files import create_folder
from raypod.training.checkpoint import format
from raypod.training.checkpoint.format import Manifest, Retention
from raypod.training.checkpoint.transfer import CheckpointReceiver

FOLDER = "~/.raypod/copies"
INDEX, ENDED = "run.json", "ended"
_FORMAT = 1
_PARTIAL, _REMOVED, _MARK = ".partial", ".removed", ".host"
_NAME = re.compile(r"(\d{6,})-(\d{8,})$")
_RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*$")

Age = Tuple[int, int]  # generation and update


class Opened(NamedTuple):
    """What a host has: the newest copy of the run (None for none), and the mark of another host on the same disk."""

    held: Optional[Age]
    shares_with: Optional[str]


def copy_name(age: Age) -> str:
    """Return the name of the folder of a copy."""
    return f"{age[0]:06d}-{age[1]:08d}"


def held_copies(folder: Path) -> List[Tuple[Age, Path]]:
    """Return the complete copies of a run in its folder, newest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.match(path.name)
        if match and (path / INDEX).is_file():
            found.append(((int(match.group(1)), int(match.group(2))), path))
    return sorted(found, reverse=True)


class CopyReceiver:
    """Writes the copies of one run into a folder of this host, and keeps the newest one."""

    def __init__(self, folder: str, run_id: str) -> None:
        """`folder` is that of all runs, with a `~` of this host. ValueError for a `run_id` that is no name."""
        if not _RUN_ID.match(run_id):
            raise ValueError(f"{run_id!r} is no name of a run")
        self._folder = Path(folder).expanduser() / run_id
        self._partial = self._folder / f"copy{_PARTIAL}"
        self._checkpoint: Optional[CheckpointReceiver] = None
        self._manifest: Optional[Manifest] = None
        self._mark: Optional[Path] = None

    def open(self, mark: str, others: Collection[str]) -> Opened:
        """Leave a mark on the disk, unless one of the marks of `others` is there: it is the same disk then.

        Raises:
            OSError: the folder cannot be written.
        """
        with contextlib.suppress(FileExistsError):
            create_folder(self._folder)
        shared = [other for other in others if self._path_of(other).exists()]
        if shared:
            return Opened(None, shared[0])
        for left in self._folder.glob(f"*{_MARK}"):
            left.unlink()
        self._mark = self._path_of(mark)
        self._mark.touch()
        held = held_copies(self._folder)
        return Opened(held[0][0] if held else None, None)

    def begin(self, update: int) -> None:
        """Begin the copy of a checkpoint; discard one that was not completed. Its tensor files come first."""
        self.discard()
        create_folder(self._partial)
        self._checkpoint = CheckpointReceiver(str(self._partial / CHECKPOINTS))
        self._checkpoint.begin(update)

    def write(self, name: str, data: bytes) -> None:
        """Append bytes to a tensor file of the checkpoint. OSError as from the file system."""
        self._receiver().write(name, data)

    def commit(self, manifest: Manifest, kept: Retention) -> Path:
        """Verify the tensor files on this disk, and write the manifest. The files of the run follow.

        Raises:
            OSError: the file system's own, or the files differ from their records.
        """
        path, self._manifest = self._receiver().commit(manifest, kept), manifest
        return path

    def write_file(self, name: str, data: bytes) -> None:
        """Append bytes to a file of the run folder. OSError as from the file system."""
        if Path(name).name != name or name == INDEX:
            raise ValueError(f"{name!r} is no file of a run folder")
        with (self._partial / name).open("ab") as file:
            file.write(data)

    def finish(self, facts: Dict[str, Any], expected: Dict[str, str]) -> None:
        """Give the copy its name, and remove older ones.

        Args:
            facts: about the run, for `run.json`.
            expected: the SHA-256 of each file of the run folder, as it was sent.

        Raises:
            OSError: the file system's own, the files differ from those that were sent, or the host holds a newer copy.
        """
        assert self._manifest is not None, "commit comes first"
        age = (self._manifest.generation, self._manifest.update)
        before = held_copies(self._folder)
        if before and before[0][0] > age:
            raise FileExistsError(f"it holds a newer copy of this run, of generation {before[0][0][0]}")
        paths = (path for path in self._partial.rglob("*") if path.is_file())
        names = sorted(path.relative_to(self._partial).as_posix() for path in paths)
        records = {name: self._record(name) for name in names}
        for name, sha256 in expected.items():
            if records.get(name, {}).get("sha256") != sha256:
                raise ConnectionError(f"the received file {name} differs from the one that was sent")
        order = {"generation": age[0], "update": age[1]}
        index = {"format": _FORMAT, **facts, **order, "files": records}
        with files.new_file(self._partial / INDEX) as file:
            file.write((json.dumps(index, indent=2) + "\n").encode())
        target = self._folder / copy_name(age)
        if target.exists():
            files.remove_folder(target)
        files.rename_folder(self._partial, target)
        for _, old in before:
            if old != target:
                files.remove_folder(old)

    def end(self, age: Age) -> None:
        """Record that the run is complete with the copy of this age. OSError as from the file system."""
        files.replace_file(self._folder / ENDED, copy_name(age).encode())

    def discard(self) -> None:
        """Remove what a transfer that did not end has left."""
        self._checkpoint = self._manifest = None
        for left in (self._partial, *self._folder.glob(f"*{_REMOVED}")):
            shutil.rmtree(str(left), ignore_errors=True)

    def close(self) -> None:
        """Discard a copy that is not complete, and remove the mark."""
        self.discard()
        with contextlib.suppress(OSError):
            if self._mark is not None:
                self._mark.unlink()
            self._folder.rmdir()  # if there is no copy

    def _path_of(self, mark: str) -> Path:
        return self._folder / f"{mark}{_MARK}"

    def _receiver(self) -> CheckpointReceiver:
        assert self._checkpoint is not None, "begin comes first"
        return self._checkpoint

    def _record(self, name: str) -> Dict[str, Any]:
        """Flush a file to disk; return its size and hash, as they are on the disk."""
        path = self._partial / name
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return {"size_bytes": path.stat().st_size, "sha256": format.digest_of_file(path, format.SHA256)}
