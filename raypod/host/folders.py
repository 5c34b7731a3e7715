"""Folders: create and remove them, hold one open against a disk that is unmounted, and look for a relative path."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from pathlib import Path
from typing import Iterator, List, Optional, Sequence

from raypod.host.files import sync_folder

_ATTEMPTS = 20
_held: List[HeldFolder] = []  # of this process


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


# A folder that this process has opened: nothing is written by its path once that leads to another folder, or to none.
#
# So it is after its disk was unmounted (`umount -l`), or the folder moved or removed. What changes files by their paths
# calls `check` before: the functions of `files.py`, through which a run writes, do.


class HeldFolder:
    """A folder and its descriptor, which knows it without its path."""

    def __init__(self, path: Path, mark: Optional[Path] = None) -> None:
        """Open the folder. A file `mark` in it proves that its path still leads there. OSError if it is not there."""
        self.path, self._mark = path, mark
        self._descriptor = os.open(str(path), os.O_RDONLY | os.O_DIRECTORY)
        _held.append(self)

    def is_elsewhere(self) -> bool:
        """Return whether the path leads to another folder, or to none, than when this was opened."""
        if self._mark is not None and os.path.lexists(str(self._mark)):
            return False
        try:
            return not os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # the disk does not answer
            return False

    def close(self) -> None:
        """Allow everything again. May be called repeatedly."""
        with contextlib.suppress(ValueError):
            _held.remove(self)
            os.close(self._descriptor)


def check(path: Path) -> None:
    """Raise OSError (ESTALE) if `path` is in a folder that this process holds, and that is elsewhere by now."""
    for each in list(_held):
        if each.path in (path, *path.parents) and each.is_elsewhere():
            raise OSError(errno.ESTALE, "the run folder is not there any more", str(path))


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a folder for the duration of the block. One that is not there is not held."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.callback(HeldFolder(path).close)
        yield
