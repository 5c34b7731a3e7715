"""Create folders that no other process has created, and remove them again."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import List, Sequence

_ATTEMPTS = 20


def create_folder(path: Path) -> List[Path]:
    """Create a folder and its missing parents; return the folders that this call has created, `path` last.

    Atomic: of several processes that create the same folder, one succeeds.

    Raises:
        FileExistsError: `path` exists.
        OSError: the file system's own.
    """
    created: List[Path] = []
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
    return [*created, path]


def create_numbered_folder(path: Path) -> List[Path]:
    """Create the first of the folders `path`, `path-2`, `path-3`, ... that does not exist; as `create_folder`."""
    candidates = itertools.chain([path], (path.with_name(f"{path.name}-{number}") for number in itertools.count(2)))
    while True:
        with contextlib.suppress(FileExistsError):
            return create_folder(next(candidates))


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders that are empty, the last first."""
    for folder in reversed(folders):
        with contextlib.suppress(OSError):  # not empty, or removed already
            folder.rmdir()
