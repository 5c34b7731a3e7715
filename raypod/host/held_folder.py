"""A folder that this process has opened: nothing is written by its path once that leads to another folder, or to none.

So it is after its disk was unmounted (`umount -l`), or the folder moved or removed. What changes files by their paths
calls `check` before: the functions of `files.py`, through which a run writes, do.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Iterator, List, Optional

_held: List[HeldFolder] = []  # of this process


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
