"""The store at which instances on the emulated SDK meet, held by a process of its own: a script for it.

It alone needs torch, whose import takes seconds; so that no program waits for it, its port is chosen before it runs
(the caller keeps a bound socket that never listens, the store takes the port over with SO_REUSEADDR), and whoever
connects early tries again. It answers everybody, so it listens on the one address; torch before 2.1 listens on all.
Arguments: host, port.
"""

from __future__ import annotations

import datetime
import importlib
import os
import signal
import socket
import sys
import time
from typing import Any, Dict

_AFTER_S = 0.3  # programs come first: those that never meet have said their first line by then
_TIMEOUT_S = 300.0


def main() -> None:
    """Serve until somebody ends this process."""
    os.nice(5)
    time.sleep(_AFTER_S)
    distributed: Any = importlib.import_module("torch.distributed")
    host, port = sys.argv[1], int(sys.argv[2])
    timeout = datetime.timedelta(seconds=_TIMEOUT_S)
    options: Dict[str, Any] = {"wait_for_workers": False}
    if "master_listen_fd" in (distributed.TCPStore.__init__.__doc__ or ""):
        options["master_listen_fd"] = _listen(host, port)
    store = distributed.TCPStore(host, port, None, True, timeout, **options)
    while store.port:
        signal.pause()


def _listen(host: str, port: int) -> int:
    """The descriptor of a socket that listens on this address alone; the store closes it."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(128)
    return listener.detach()


if __name__ == "__main__":
    main()
