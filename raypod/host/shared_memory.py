"""Anonymous files in memory that other processes of this host can open, as long as the process that made them lives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO


def anonymous_file(name: str) -> IO[bytes]:
    """Return a new file without a buffer. It ends with this process, however that ends; `name` is for `ls /proc`."""
    return os.fdopen(os.memfd_create(name), "r+b", buffering=0)


def path_of(pid: int, descriptor: int) -> Path:
    """Return the path by which other processes of the same user open a file of process `pid`."""
    return Path(f"/proc/{pid}/fd/{descriptor}")
