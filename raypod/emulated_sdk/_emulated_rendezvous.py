"""Where the processes of one emulated pod meet: a `TCPStore` of torch, which a launcher opens (contract section 6.4).

`_emulated_pod` says which environment variables there are.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Dict, Optional, Tuple

import torch.distributed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

RENDEZVOUS = "EMULATED_POD_RENDEZVOUS"
GENERATION = "EMULATED_POD_GENERATION"
TIMEOUT_S = "EMULATED_POD_TIMEOUT_S"
LONGEST_JOIN_S = 60.0
FAILED = "failed"  # set beside the ranks that are here when one will not come


class PeerFailed(RuntimeError):
    """The other processes are the cause: one has ended, failed, stays away or is silent."""


_c10d: Any = torch.distributed  # whose stubs lack half of what its documentation names
_DEFAULT_TIMEOUT_S = 300.0

_store: Optional[Store] = None
_store_address = ""


def open_rendezvous(host: str = "127.0.0.1", port: int = 0) -> Tuple[Store, str]:
    """Opens the store at which a pod's processes meet.

    Returns the store, which must be kept alive as long as the pod runs, and its address "host:port" for
    EMULATED_POD_RENDEZVOUS. `host` is the name under which the other processes reach this one; `port` 0 lets the system
    choose, another may be kept by a bound socket with SO_REUSEADDR that does not listen. The store answers
    everybody, so it listens on that address alone, where torch lets it: not before 2.1, which listens on all of them.
    """
    options: Dict[str, Any] = {"wait_for_workers": False}
    if "master_listen_fd" in (_c10d.TCPStore.__init__.__doc__ or ""):
        listener = _listen(host, port)
        port = listener.getsockname()[1]
        options["master_listen_fd"] = listener.detach()  # the store closes it
    store = _c10d.TCPStore(host, port, None, True, timedelta(seconds=_DEFAULT_TIMEOUT_S), **options)
    return store, f"{host}:{store.port}"


def timeout_s() -> float:
    """Bound of every wait in seconds, out of EMULATED_POD_TIMEOUT_S; RuntimeError if that is not a positive number."""
    text = os.environ.get(TIMEOUT_S, str(_DEFAULT_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise RuntimeError(f"{TIMEOUT_S}={text!r} is not a positive number of seconds")
    return seconds


def client(size: int) -> Tuple[Store, str]:
    """This process's one client of the store, and the store's address."""
    global _store, _store_address
    address = os.environ.get(RENDEZVOUS, "")
    if not address:
        raise RuntimeError(
            f"{RENDEZVOUS} is not set, and {size} processes cannot meet without it: whoever launches the instances"
            " opens a store (raypod does; in plain Python _emulated_pod.open_rendezvous) and sets it to its host:port"
        )
    if _store is None or _store_address != address:
        host, port = split(address)
        bound = timedelta(seconds=math.ceil(min(timeout_s(), LONGEST_JOIN_S)))  # torch 2.0 counts whole seconds here
        try:
            _store = _c10d.TCPStore(host, port, None, False, bound, wait_for_workers=False)
        except (RuntimeError, TimeoutError) as error:
            raise RuntimeError(
                f"no store answers at {RENDEZVOUS}={address} (tried for {bound.total_seconds():g} s): {error}"
            ) from error
        _store_address = address
    return _store, address


def forget() -> Optional[Store]:
    """Lets go of the client; the next call of `client` makes a new one."""
    global _store
    store, _store = _store, None
    return store


def meet(store: Store, key: str, where: str, rank: int, size: int, bound_s: float, given_up: threading.Event) -> None:
    """Waits until every rank has said under `key` that it is here: Gloo alone would not tell who is missing.

    `where` names the group in errors. RuntimeError if a rank is missing at the bound, this one is taken, one failed, or
    another thread sets `given_up`.
    """
    if store.add(f"{key}/{rank}", 1) > 1:
        raise RuntimeError(
            f"rank {rank} {where} has joined before under {key!r}: restarted processes need a new {GENERATION}"
        )
    deadline, pause_s = time.monotonic() + bound_s, 0.002
    missing = list(range(size))
    while missing:
        missing = [other for other in missing if not store.add(f"{key}/{other}", 0)]  # reads; torch 2.0 has no check()
        if missing and store.add(f"{key}/{FAILED}", 0):
            raise PeerFailed(f"rank {rank} {where}: another rank has failed before it joined")
        if missing and given_up.is_set():
            raise PeerFailed(f"rank {rank} {where}: given up while rank {missing[0]} had not joined")
        if missing and time.monotonic() > deadline:
            store.add(f"{key}/{rank}", -1)  # so that this rank may try again, and nobody takes it for here
            ranks = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
            raise PeerFailed(f"rank {rank} waited {bound_s:g} s for {ranks} {where}")
        time.sleep(pause_s if missing else 0.0)
        pause_s = min(pause_s * 1.5, 0.05)


def own_address(host: str, port: int) -> str:
    """The address of this host on the route to the rendezvous. Connecting a datagram socket sends nothing."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def split(address: str) -> Tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise RuntimeError(f"{RENDEZVOUS}={address!r} is not host:port")
    return host.strip("[]"), int(port)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket on the one address."""
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener
