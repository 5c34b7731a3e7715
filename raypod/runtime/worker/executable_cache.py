"""The folder in which PopTorch keeps compiled executables, and its lock files there.

Of the processes of a run, PopTorch lets the first one compile and the others wait: each appends a byte to a lock file,
and the last one removes it. It counts the processes of all hosts. A folder of one host never sees them all, so the file
remains, and at the next start no process is the first one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import warnings
from pathlib import Path
from typing import Optional

from raypod.plan.plan import Plan
from raypod.system.sdk import Sdk

_LOCK = re.compile(r"[0-9a-f]{16,}\.lock")  # a hash of the model


def folder_of(plan: Plan, sdk: Sdk) -> Optional[str]:
    """Return the folder of a run's executables on this host, created; None on the emulated SDK if none is chosen.

    By default it is of this user and this host: a home folder can be shared, and a lock between hosts cannot be relied
    upon. POPTORCH_CACHE_DIR takes precedence, as PopTorch reads it.
    """
    chosen = plan.config.pod.executable_cache_path or os.environ.get("POPTORCH_CACHE_DIR")
    if chosen or not sdk.has_ipus:
        return chosen
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = cache / "raypod" / "executables" / socket.gethostname()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(
            f"executables are not cached, so every process compiles: {folder} cannot be created ({error.strerror}); "
            "choose a folder with --executable-cache-path",
            stacklevel=2,
        )
        return None
    return str(folder)


def remove_stale_locks(folder: Optional[str]) -> None:
    """Remove the lock files that no process holds: one process of each host then compiles.

    Call it before the processes of a run meet, as they compile only afterwards.
    """
    for path in filter(lambda each: _LOCK.fullmatch(each.name), Path(folder).glob("*.lock") if folder else ()):
        # A process of another run holds it, another one of this run has removed it, or it is another user's.
        with contextlib.suppress(OSError), path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
