"""Create folders that no other process has created, and remove them again; where a relative path is looked for."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import List, Sequence

from raypod.host.files import sync_folder

_ATTEMPTS = 20


def create_folder(path: Path) -> List[Path]:
    """Create a folder and its missing parents durably; return the folders that this call has created, `path` last.

    Atomic: of several processes that create the same folder, one succeeds.

    Raises:
        FileExistsError: `path` exists.
        OSError: the file system's own.
    """
    created: List[Path] = []
    _create(path, created)
    return created


def create_numbered_folder(path: Path) -> List[Path]:
    """Create the first of the folders `path`, `path-2`, `path-3`, ... that does not exist; as `create_folder`."""
    created: List[Path] = []  # with the parents that were created before the name was found to be taken
    candidates = itertools.chain([path], (path.with_name(f"{path.name}-{number}") for number in itertools.count(2)))
    while True:
        with contextlib.suppress(FileExistsError):
            _create(next(candidates), created)
            return created


def _create(path: Path, created: List[Path]) -> None:
    """Create a folder and its missing parents, and append those that this call has created to `created`."""
    for attempt in itertools.count(1):
        for parent in reversed(path.parents):
            if not parent.exists():
                with contextlib.suppress(FileExistsError):
                    parent.mkdir()
                    created.append(parent)
        try:
            path.mkdir()
            break
        except FileNotFoundError:  # another process has removed an empty parent again
            if attempt == _ATTEMPTS:
                remove_empty(created)
                raise
    created.append(path)
    for folder in created:
        with contextlib.suppress(PermissionError):  # a folder that this user may write to, but not read
            sync_folder(folder.parent)


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders that are empty, the last first."""
    for folder in reversed(folders):
        with contextlib.suppress(OSError):  # not empty, or removed already
            folder.rmdir()


def looked_in(path: Path) -> str:
    """Return, for the message that a path does not exist, in which folder it was looked for: " in FOLDER" or ""."""
    return "" if path.is_absolute() else f" in {Path.cwd()}"
