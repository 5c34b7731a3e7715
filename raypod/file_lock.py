"""One process at a time, on one host or on several that share a file system: a lock that ends with its holder."""

from __future__ import annotations

import contextlib
import fcntl
import time
from pathlib import Path
from typing import Iterator

from raypod.errors import WaitTimedOut

_LOOK_EVERY_S = 0.05


@contextlib.contextmanager
def locked(path: Path, timeout_s: float, setting: str) -> Iterator[None]:
    """Hold the lock file `path`, which is made where it is missing and stays.

    Raises:
        WaitTimedOut: somebody else holds it longer than `timeout_s`, which the config key `setting` sets.
        OSError: the file cannot be made.
    """
    deadline = time.monotonic() + timeout_s
    with path.open("a") as file:
        while not _taken(file.fileno()):
            if time.monotonic() > deadline:
                raise WaitTimedOut(f"the lock {path}, which another process holds", timeout_s, setting)
            time.sleep(_LOOK_EVERY_S)
        yield  # closing the file gives the lock back


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
