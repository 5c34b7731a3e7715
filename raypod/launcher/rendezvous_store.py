"""The store at which instances on the emulated SDK meet, held by a process of its own: a script for it.

It alone needs torch, whose import takes seconds; so that no program waits for it, its port is chosen before it runs
(the caller keeps a bound socket that never listens, the store takes the port over with SO_REUSEADDR), and whoever
connects early tries again. It answers everybody, so it listens on the one address; torch before 2.1 listens on all.
Arguments: host, port.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path

_AFTER_S = 0.3  # programs come first: those that never meet have said their first line by then
_EMULATED_SDK = str(Path(__file__).resolve().parents[1] / "emulated_sdk")


def main() -> None:
    """Serve until somebody ends this process."""
    os.nice(5)
    time.sleep(_AFTER_S)
    sys.path.append(_EMULATED_SDK)
    store, _ = importlib.import_module("_emulated_rendezvous").open_rendezvous(sys.argv[1], int(sys.argv[2]))
    while store.port:
        signal.pause()


if __name__ == "__main__":
    main()
