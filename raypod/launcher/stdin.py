"""Hands the stdin of a launch to instance 0, from a thread of its own.

A terminal is not read while the launch is in the background: the kernel would stop it for that.
"""

from __future__ import annotations

import os
import select
import threading
from typing import Callable, Optional

_LOOK_S = 0.2
_READ_BYTES = 1 << 16
Write = Callable[[bytes, float], Optional[bool]]


class StdinForwarder:
    """Forwards until the end of stdin, until nobody listens, or until `close`."""

    def __init__(self, write: Write, descriptor: int = 0) -> None:
        """`write(data, within_s)`: True when done, False when nobody listens, None: say the same again."""
        self._write, self._descriptor = write, descriptor
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stdin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; bounded."""
        self._closing.set()
        self._thread.join(5 * _LOOK_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            data = self._read()
            if data is None:
                continue
            done = None
            while done is None and not self._closing.is_set():
                done = self._write(data, _LOOK_S)
            if not data or not done:
                return

    def _read(self) -> Optional[bytes]:
        """What came; b"" at the end, None if nothing came for a moment."""
        try:
            if os.isatty(self._descriptor) and os.tcgetpgrp(self._descriptor) != os.getpgrp():
                self._closing.wait(_LOOK_S)
                return None
            ready, _, _ = select.select([self._descriptor], [], [], _LOOK_S)
            return os.read(self._descriptor, _READ_BYTES) if ready else None
        except (OSError, ValueError):  # closed, or a terminal that is gone
            return b""
