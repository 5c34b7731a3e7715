"""Door `rendezvous`: the store through which the processes of a pod find each other, and the end of their waits.

A launcher serves the store and passes its variables to all processes. `_pod.wires` connects them; an installed Horovod
uses the store through a client, too. With the Poplar SDK `abort` and `close` concern the emulated Horovod only: they
end no wait inside that SDK or an installed Horovod.
"""

from __future__ import annotations

import os
import threading
from typing import Callable, List, Mapping, Optional

from _pod.activation import GENERATION, RENDEZVOUS, SECRET, TIMEOUT_S
from _pod.store_client import StoreClient
from _pod.store_protocol import PeerFailed
from _pod.store_server import StoreServer

__all__ = ["PeerFailed", "StoreClient", "StoreServer", "abort", "close", "connect", "host_of", "serve", "timeout_s"]

_DEFAULT_TIMEOUT_S = 300.0
_on_abort: List[Callable[[str], None]] = []
_on_close: List[Callable[[], None]] = []


def serve(address: str, generation: int) -> StoreServer:
    """Open a store on `address`, a name or address of this host; `StoreServer.environment` is for all processes.

    Args:
        generation: processes that are restarted need another one.

    Raises:
        OSError: the address cannot be resolved or bound.
    """
    server = StoreServer(address)
    server.environment[GENERATION] = str(generation)
    return server


def host_of(environment: Mapping[str, str]) -> Optional[str]:
    """Return the host of the store in the variables of `serve`; None without a store."""
    return environment[RENDEZVOUS].rpartition(":")[0] if RENDEZVOUS in environment else None


def connect(
    environment: Mapping[str, str], connect_timeout_s: float, cancelled: Optional[threading.Event] = None
) -> StoreClient:
    """Connect to the store in the variables of `serve`.

    Raises:
        PeerFailed: it does not answer, or `cancelled` was set meanwhile.
        RuntimeError: it has another secret.
    """
    _, _, port = environment[RENDEZVOUS].rpartition(":")
    host = host_of(environment)
    assert host is not None, "the variables name a store"
    return StoreClient(host, int(port), environment[SECRET], connect_timeout_s, cancelled)


def timeout_s() -> float:
    """Return the timeout of every wait in seconds; RuntimeError if EMULATED_POD_TIMEOUT_S is not a positive number."""
    text = os.environ.get(TIMEOUT_S, str(_DEFAULT_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise RuntimeError(f"{TIMEOUT_S}={text!r} is not a positive number of seconds")
    return seconds


def register(on_abort: Callable[[str], None], on_close: Callable[[], None]) -> None:
    """Add what `abort` and `close` call, from the modules that hold connections."""
    _on_abort.append(on_abort)
    _on_close.append(on_close)


def abort(reason: str) -> None:
    """End every wait of this process for others, from any thread: it raises PeerFailed, here and in the peers."""
    for each in _on_abort:
        each(reason)


def close() -> None:
    """Close every connection to other processes and to the store: the next use opens new ones."""
    for each in _on_close:
        each()
