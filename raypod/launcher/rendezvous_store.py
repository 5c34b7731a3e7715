"""The store at which instances on the emulated SDK meet, held by a process of its own: a script for it.

It alone needs torch, whose import takes seconds; so that no program waits for it, its port is chosen before it runs
(the caller keeps a bound socket that never listens, the store takes the port over with SO_REUSEADDR), and whoever
connects early tries again. Arguments: host, port.
"""

from __future__ import annotations

import datetime
import importlib
import os
import signal
import sys
import time
from typing import Any

_AFTER_S = 0.3  # programs come first: those that never meet have said their first line by then
_TIMEOUT_S = 300.0


def main() -> None:
    """Serve until somebody ends this process."""
    os.nice(5)
    time.sleep(_AFTER_S)
    distributed: Any = importlib.import_module("torch.distributed")
    host, port = sys.argv[1], int(sys.argv[2])
    timeout = datetime.timedelta(seconds=_TIMEOUT_S)
    store = distributed.TCPStore(host, port, None, True, timeout, wait_for_workers=False)
    while store.port:
        signal.pause()


if __name__ == "__main__":
    main()
