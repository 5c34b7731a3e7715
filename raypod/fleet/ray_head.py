"""Detects that the head of the Ray cluster is lost, and ends this process.

Ray needs its head: calls to it block the main thread, and after a minute Ray ends this process without a message.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import Callable

from raypod.errors import RunError
from raypod.fleet import gcs
from raypod.host.abort import abort

_INTERVAL_S = 1.0
_TIMEOUT_S = 3.0
# In a row: 5 refused connections (no process listens any more), or 10 requests without an answer, because a host that
# is overloaded or restarts its network can be silent for a while. This takes 5 s or 40 s; Ray gives up after 60 s.
_MOST_MISSED, _REFUSED_COUNTS = 10, 2


class HeadWatch:
    """Sends a request to the GCS every second; `raypod.host.abort` ends this process if it is considered lost."""

    def __init__(self, address: str, name: str, way_out: Callable[[], str]) -> None:
        """`address` is HOST:PORT of the GCS; `name` (of what is lost) and `way_out()` are for the error message."""
        self._address, self._name, self._way_out = address, name, way_out
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="head watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after a last request. If the head is lost, this does not return, because Ray's errors hide the cause."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        missed, is_closing = 0, False
        while missed or not is_closing:
            if missed:
                time.sleep(_INTERVAL_S)
            is_closing = self._closing.wait(0 if missed else _INTERVAL_S)
            # A refused token is an answer, too. Another user's process can have taken the port of one that has ended.
            answer = gcs.check(self._address, timeout_s=_TIMEOUT_S, only_own=True)
            if answer.state in (gcs.ANSWERED, gcs.REFUSED):
                missed = 0
            else:
                missed += _REFUSED_COUNTS if answer.detail == os.strerror(errno.ECONNREFUSED) else 1
            if missed >= _MOST_MISSED:
                abort(
                    RunError(
                        f"{self._name} is lost: its GCS at {self._address} does not respond ({answer.detail}), and "
                        f"Ray cannot continue without it; {self._way_out()}"
                    )
                )
