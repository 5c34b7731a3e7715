"""Where the processes of one emulated pod meet: a store that a launcher opens (contract section 6.4), and how.

`_emulated_pod` says which environment variables there are.
"""

from __future__ import annotations

import os
import socket
import string
from datetime import timedelta
from typing import Any, Optional, Tuple

import torch.distributed
from _emulated_store import Store
from _emulated_store_client import StoreClient
from _emulated_store_protocol import PeerFailed

RENDEZVOUS = "EMULATED_POD_RENDEZVOUS"
SECRET = "EMULATED_POD_SECRET"
GENERATION = "EMULATED_POD_GENERATION"
TIMEOUT_S = "EMULATED_POD_TIMEOUT_S"
LONGEST_JOIN_S = 60.0
FAILED = "failed"  # set beside the ranks that are here when one will not come


_c10d: Any = torch.distributed  # whose stubs lack half of what its documentation names
_DEFAULT_TIMEOUT_S = 300.0

_store: Optional[Store] = None
_store_told = ("", "")  # its address and secret


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
    """This process's one connection to the store, and the store's address."""
    global _store, _store_told
    told = address, secret = os.environ.get(RENDEZVOUS, ""), os.environ.get(SECRET, "")
    for name, value in ((RENDEZVOUS, address), (SECRET, secret)):
        if not value:
            raise RuntimeError(
                f"{name} is not set, and {size} processes cannot meet without it: whoever launches the instances opens"
                " a store (raypod does; in plain Python _emulated_pod.StoreServer) and hands down its `environment`"
            )
    if _store is None or _store_told != told or not _store.client.is_open:
        host, port = split(address)
        if len(secret) % 2 or set(secret) - set(string.hexdigits):
            raise RuntimeError(f"{SECRET} is not the secret of a store: those are hexadecimal digits")
        bound_s = min(timeout_s(), LONGEST_JOIN_S)
        if _store is not None:
            _store.client.close()
        try:
            _store = Store(StoreClient(host, port, secret, bound_s))
        except PeerFailed as error:
            raise PeerFailed(f"{RENDEZVOUS}={address}: {error}") from error
        except RuntimeError as error:
            raise RuntimeError(f"{RENDEZVOUS}={address}, {SECRET}: {error}") from error
        _store_told = told
    return _store, address


def forget() -> Optional[Store]:
    """Lets go of the connection, which the caller closes or keeps; the next call of `client` makes a new one."""
    global _store
    store, _store = _store, None
    return store


def meet(store: Store, key: str, where: str, rank: int, size: int, bound_s: float) -> None:
    """Waits until every rank has said under `key` that it is here: Gloo alone would not tell who is missing.

    `where` names the group in errors. RuntimeError if this rank is taken, PeerFailed if a rank is missing at the bound,
    one failed, or another thread gives up.
    """
    keys, failed = [f"{key}/{other}" for other in range(size)], f"{key}/{FAILED}"
    if store.client.add(keys[rank], 1) > 1:
        raise RuntimeError(
            f"rank {rank} {where} has joined before under {key!r}: restarted processes need a new {GENERATION}"
        )
    missing = [int(each.rpartition("/")[2]) for each in store.client.wait(keys, bound_s, unless=[failed])]
    if not missing:
        return
    if store.client.given_up.is_set():
        raise PeerFailed(f"rank {rank} {where}: given up while rank {missing[0]} had not joined")
    if store.client.has([failed]):
        raise PeerFailed(f"rank {rank} {where}: another rank has failed before it joined")
    store.client.delete(keys[rank])  # so that this rank may try again, and nobody takes it for here
    ranks = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
    raise PeerFailed(f"rank {rank} waited {bound_s:g} s for {ranks} {where}")


def gloo_options(address: str, wait_s: float) -> Any:
    """Of wires that listen on the interface that is asked for, else on the address that reaches the rendezvous."""
    gloo = _c10d.ProcessGroupGloo
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interfaces:
        devices = [gloo.create_device(interface=name) for name in interfaces.split(",")]
    else:
        devices = [gloo.create_device(hostname=own_address(*split(address)))]
    options = gloo._Options()
    options._devices = devices
    options._timeout = timedelta(seconds=wait_s)
    options._threads = 2 * len(devices)
    return options


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
